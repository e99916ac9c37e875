"""Rows of Q against a slow drawer in plain Python integers, and their laws against the normal and the uniform one."""

import hashlib
import itertools
import math
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from lightning_spectral.functional import zampling as matrix
from lightning_spectral.functional.zampling import BLOCK_ROWS, draw_rows

WORD = 2**64 - 1
LEVEL = 1e-6  # of every test of a hypothesis; seeds are fixed, so each passes or fails for good

# A sum of quantiles is like an integral of a growing function by rectangles: it lacks at most the tails beyond the last
# quantile, 4.32, and exceeds by at most the last rectangles. What the second moment lacks is made up for by the scale.
EDGE = NormalDist().inv_cdf(1 - 0.5 / 2**16)
DENSITY, TAIL = NormalDist().pdf(EDGE), NormalDist().cdf(-EDGE)
SECOND = max(2 * (EDGE * DENSITY + TAIL), 2 * EDGE**2 / 2**16)
FOURTH = max(2 * ((EDGE**3 + 3 * EDGE) * DENSITY + 3 * TAIL), 2 * EDGE**4 / 2**16) + 3 * 2 * SECOND


def philox(seed: int, stream: int, count: int) -> list[int]:
    """Philox4x64-10 of Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3."""
    words: list[int] = []
    for block in range(1, -(-count // 4) + 1):
        c, k0, k1 = (block, 0, 0, stream), seed, 0
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = ((second >> 64) ^ c[1] ^ k0, second & WORD, (first >> 64) ^ c[3] ^ k1, first & WORD)
            k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
        words += c
    return words[:count]


def slow_table() -> list[float]:
    """Normal quantiles of variance 1 on the grid, by another library's algorithm."""
    upper = [NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**15, 2**16)]
    scale = math.sqrt(math.fsum(x * x for x in upper) / 2**15)
    upper = [round(x / scale * 2**20) / 2**20 for x in upper]
    return [-x for x in reversed(upper)] + upper


def slow_rows(
    seed: int, block: int, num_rows: int, num_columns: int, degree: int, table: list[float]
) -> tuple[list[list[int]], list[list[float]]]:
    """One row after the other by Floyd's algorithm (Bentley & Floyd, 1987), in whole numbers."""
    columns = []
    words = iter(philox(seed, 2 * block, num_rows * degree))
    for _ in range(num_rows):
        chosen: set[int] = set()
        for last in range(num_columns - degree, num_columns):
            drawn = (next(words) >> 11) * (last + 1) >> 53
            chosen.add(last if drawn in chosen else drawn)
        columns.append(sorted(chosen))
    words_of_values = philox(seed, 2 * block + 1, -(-num_rows * degree // 4))
    pieces = [(word >> (16 * k)) & 0xFFFF for word in words_of_values for k in range(4)]
    values = [table[piece] for piece in pieces[: num_rows * degree]]
    return columns, [values[i * degree : (i + 1) * degree] for i in range(num_rows)]


@pytest.mark.parametrize(
    ("seed", "block", "num_rows", "num_columns", "degree"),
    [(0, 0, 20, 7, 3), (2**64 - 1, 0, 9, 10**6, 10), (12345, 7, 33, 5, 5), (1, 2**40, 3, 1, 1), (2**63, 3, 10, 40, 1)],
)
def test_rows_are_those_of_the_slow_drawer(seed: int, block: int, num_rows: int, num_columns: int, degree: int) -> None:
    columns, values = draw_rows(seed, block, num_rows, num_columns, degree)
    slow_columns, slow_values = slow_rows(seed, block, num_rows, num_columns, degree, slow_table())
    assert columns.tolist() == slow_columns
    assert values.tolist() == slow_values
    signs = draw_rows(seed, block, num_rows, num_columns, degree, "sign")[1]
    assert signs.tolist() == np.sign(slow_values).tolist()
    diagonal = draw_rows(seed, block, num_rows, num_columns, None)
    assert diagonal[0].tolist() == [[0]] * num_rows
    assert diagonal[1].ravel().tolist() == [v for row in slow_values for v in row][:num_rows]


def test_a_fresh_process_draws_the_same_rows_whatever_was_drawn_before() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    columns, values = draw_rows(42, 3, 1000, 500, 10)
    torch.rand(3), np.random.rand(3)
    assert all(map(np.array_equal, draw_rows(42, 3, 1000, 500, 10), (columns, values)))
    code = (
        "import hashlib; from lightning_spectral.functional.zampling import draw_rows;"
        "columns, values = draw_rows(42, 3, 1000, 500, 10);"
        "print(hashlib.sha256(columns.tobytes() + values.tobytes()).hexdigest())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert printed.stdout.strip() == hashlib.sha256(columns.tobytes() + values.tobytes()).hexdigest(), printed.stderr


def test_fewer_rows_are_the_first_of_more_and_other_seeds_and_blocks_have_others() -> None:
    columns, values = draw_rows(1, 0, 101, 1000, 3)
    for num_rows in (1, 2, 50, 100):
        assert all(map(np.array_equal, draw_rows(1, 0, num_rows, 1000, 3), (columns[:num_rows], values[:num_rows])))
    for seed, block in [(2, 0), (1, 1), (1 + 2**32, 0), (1 + 2**63, 0)]:
        other_columns, other_values = draw_rows(seed, block, 101, 1000, 3)
        assert (columns == other_columns).all(1).sum() == 0
        assert (values == other_values).all(1).sum() == 0


@pytest.mark.parametrize(("num_columns", "degree"), [(6, 3), (5, 1), (7, 2), (7, 6), (5, 5), (9, 4)])
def test_every_subset_of_columns_is_equally_likely(num_columns: int, degree: int) -> None:
    counts = dict.fromkeys(itertools.combinations(range(num_columns), degree), 0)
    for row in draw_rows(7, 0, BLOCK_ROWS, num_columns, degree)[0].tolist():
        counts[tuple(row)] += 1  # a KeyError for columns that are not distinct, or do not ascend
    expected = BLOCK_ROWS / len(counts)
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    assert statistic <= chi2.ppf(1 - LEVEL, max(1, len(counts) - 1))


def test_the_table_of_values_is_normal() -> None:
    table = matrix._table("normal").astype(float)
    assert np.array_equal(table, -table[::-1])  # so all odd moments are exactly 0
    # each entry moves by at most half a step of the grid, so the mean square by at most one step times E|x| < 1
    assert np.mean(table**2) == pytest.approx(1.0, rel=0, abs=2.0**-20)
    assert np.mean(table**4) == pytest.approx(3.0, rel=0, abs=FOURTH)
    # a density of at most 0.4 times half a step of the grid, and x times it, at most 0.25, times the scale
    probabilities = np.array([NormalDist().cdf(x) for x in table])
    assert np.abs(probabilities - (np.arange(2**16) + 0.5) / 2**16).max() < 0.4 * 2.0**-21 + 0.25 * SECOND / 2
    assert set(matrix._table("sign").tolist()) == {-1.0, 1.0}
    assert matrix._table("sign").sum() == 0


def test_no_value_of_the_table_is_so_close_to_a_rounding_boundary_that_a_platform_could_flip_it() -> None:
    """The last digits of log and of a mean are worth 5 * 2^20 * 1e-15 steps of the grid, some 1e-8."""
    upper = np.array([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**15, 2**16)])
    steps = upper / math.sqrt(math.fsum(upper**2) / 2**15) * 2.0**20
    from_boundary = np.abs(steps - np.floor(steps) - 0.5)
    assert from_boundary.min() > 1e-7
    assert np.array_equal(np.round(steps) / 2**20, matrix._table("normal")[2**15 :])
