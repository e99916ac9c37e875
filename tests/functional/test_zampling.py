"""Zampling: links, packed bits, coordinated draws, and the matrix Q against slow drawers and dense products."""

import hashlib
import itertools
import math
import pickle
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from lightning_spectral.algorithms.zampling import bit_entropy, coordinated_uniforms, pack_levels, unpack_levels
from lightning_spectral.functional import zampling as matrix
from lightning_spectral.functional.zampling import (
    BLOCK_ROWS,
    Clip,
    InfluenceMatrix,
    LayerRows,
    Link,
    Sigmoid,
    draw_rows,
    pack_bits,
    unpack_bits,
)


def random_bits(n: int) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(n)) < 0.5


@pytest.mark.parametrize("n", [*range(21), 1000, 4099])
def test_bits_come_back_and_travel_as_those_of_numpy(n: int) -> None:
    for bits in (random_bits(n), torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)):
        packed = pack_bits(bits)
        assert packed.dtype == torch.uint8
        assert packed.tolist() == np.packbits(bits.numpy()).tolist()
        assert torch.equal(unpack_bits(packed, n), bits)
        for dtype in (torch.uint8, torch.int64, torch.float32):
            assert torch.equal(pack_bits(bits.to(dtype)), packed)


@pytest.mark.parametrize("num_bits", [0, 7, 8, 17, 24])
def test_bytes_that_are_not_those_of_so_many_bits_are_refused(num_bits: int) -> None:
    packed = pack_bits(random_bits(12))
    with pytest.raises(ValueError, match=rf"{num_bits} bits travel as {-(-num_bits // 8)} bytes, got shape \(2,\)"):
        unpack_bits(packed, num_bits)
    for wrong in (packed.to(torch.int8), packed.float(), packed[None]):
        with pytest.raises(ValueError, match="12 bits travel as 2 bytes, got shape"):
            unpack_bits(wrong, 12)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [1, 2, 3, 8, 16])
def test_levels_are_unbiased_and_next_to_the_probability(k: int) -> None:
    n, repeats, top = 67, 400, 2**k - 1
    probs = torch.linspace(0, 1, n, dtype=torch.float64)
    generator = torch.Generator().manual_seed(k)
    sent = [pack_levels(probs, k, generator) for _ in range(repeats)]
    assert {tuple(planes.shape) for planes in sent} == {(k, math.ceil(n / 8))}
    levels = torch.stack([unpack_levels(planes, n, k) for planes in sent])
    steps = levels * top
    assert ((steps - steps.round()).abs() <= top * torch.finfo(torch.float64).eps).all()
    assert ((levels - probs).abs() < 1 / top + 1e-15).all()
    # a level is the lower one or the upper one, with a variance of f (1 - f) steps for the fraction f between them
    fraction = probs * top - (probs * top).floor()
    assert ((levels.mean(0) - probs).abs() <= 5 * (fraction * (1 - fraction) / repeats).sqrt() / top + 1e-15).all()


@pytest.mark.parametrize("k", range(1, 17))
def test_every_level_arrives_as_it_is_and_0_and_1_are_among_them(k: int) -> None:
    top = 2**k - 1
    chosen = torch.tensor(sorted({0, 1, top // 3, top // 2, top - 1, top}), dtype=torch.float64)
    for seed in range(20):
        arrived = unpack_levels(pack_levels(chosen / top, k, torch.Generator().manual_seed(seed)), len(chosen), k)
        assert arrived[0] == 0.0
        assert arrived[-1] == 1.0
        # a quotient times `top` may fall short of a whole number by its rounding, so may end one level below
        assert ((arrived * top).round() == chosen).all()


@pytest.mark.parametrize("k", [1, 8, 16])
def test_the_largest_uniform_does_not_carry_1_beyond_the_highest_level(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - 2^-53 plus a whole number rounds to the next one, which k binary digits do not hold."""
    largest = 1 - 2.0**-53
    assert math.floor(2**k - 1 + largest) == 2**k
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), largest, dtype=torch.float64))
    assert unpack_levels(pack_levels(torch.ones(3), k), 3, k).tolist() == [1.0] * 3


def test_entropy_is_that_of_a_slow_loop() -> None:
    probs = torch.cat([torch.linspace(0, 1, 33), torch.tensor([1e-30, 1e-7])])
    expected = [-sum(q * math.log2(q) for q in (p, 1 - p) if q > 0) for p in probs.tolist()]
    entropy = bit_entropy(probs)
    assert entropy.dtype == torch.float64
    assert entropy.tolist() == pytest.approx(expected, rel=8 * torch.finfo(torch.float64).eps, abs=0)
    assert bit_entropy(probs[:4].view(2, 2)).shape == (2, 2)
    assert bit_entropy(torch.tensor([0.0, 0.5, 1.0])).tolist() == [0.0, 1.0, 0.0]


def test_another_number_of_digits_is_refused() -> None:
    with pytest.raises(ValueError, match="3 digits travel as 3 rows of bytes, got 1"):
        unpack_levels(torch.zeros(1, 1, dtype=torch.uint8), num_probs=8, num_bits=3)


ENTRIES = 40_000


def draw(place: int, num_places: int, entries: int = ENTRIES) -> Tensor:
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(place + 1)
    return coordinated_uniforms(entries, place, num_places, shared, own)


def variance_of_mean(probs: list[Fraction], strata: int) -> Fraction:
    """Of the bits of clients with these probabilities, over all pairs of a first stratum and a step."""
    squares = Fraction(0)
    for first, step in product(range(strata), range(1, strata)):
        places = [(first + step * k) % strata for k in range(len(probs))]  # the strata of a client's numbers
        p = [min(max(q * strata - place, Fraction(0)), Fraction(1)) for q, place in zip(probs, places, strict=True)]
        squares += sum(p) ** 2 + sum(x * (1 - x) for x in p)  # numbers within strata are independent
    return (squares / (strata * (strata - 1)) - sum(probs) ** 2) / len(probs) ** 2


def independent_variance(probs: list[Fraction]) -> Fraction:
    return sum((p * (1 - p) for p in probs), Fraction(0)) / len(probs) ** 2


@pytest.mark.parametrize("num_places", [1, 2, 4, 10])
def test_each_number_is_uniform(num_places: int) -> None:
    for place in range(num_places):
        counts = torch.histc(draw(place, num_places), bins=20, min=0.0, max=1.0)
        chi_square = float(((counts - ENTRIES / 20) ** 2 / (ENTRIES / 20)).sum())
        assert abs(chi_square - 19) < 5 * math.sqrt(2 * 19)


@pytest.mark.parametrize(("num_places", "strata"), [(2, 2), (4, 5), (10, 11)])
def test_two_clients_are_never_in_one_stratum_and_equally_often_in_any_two(num_places: int, strata: int) -> None:
    one, two = ((draw(place, num_places) * strata).long() for place in (0, num_places - 1))
    counts = (one * strata + two).bincount(minlength=strata**2).view(strata, strata).double()
    assert not counts.diagonal().any()
    expected = ENTRIES / (strata * (strata - 1))
    assert float((counts - expected)[~torch.eye(strata, dtype=torch.bool)].abs().max()) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    "probs",
    [[0.5] * 10, [0.37] * 10, [0.03] * 10, [0.5] * 5 + [0.0] * 5, [k / 9 for k in range(10)], [0.1, 0.8, 0.35]],
    ids=["half", "0.37", "rare", "two kinds", "all kinds", "three"],
)
def test_the_mean_varies_as_enumeration_says_and_less_than_with_independent_draws(probs: list[float]) -> None:
    strata = 11 if len(probs) == 10 else 3
    exact = [Fraction(p) for p in probs]
    drawn = torch.stack([(draw(k, len(probs)) < p).double() for k, p in enumerate(probs)]).mean(0)
    expected = float(variance_of_mean(exact, strata))
    error = drawn - float(sum(exact)) / len(probs)
    fourth = float((error**4).mean())
    assert abs(float(error.mean())) < 5 * math.sqrt(expected / ENTRIES)
    assert abs(float((error**2).mean()) - expected) < 5 * math.sqrt(fourth / ENTRIES)
    assert variance_of_mean(exact, strata) < independent_variance(exact)


def test_equal_probabilities_and_a_prime_number_of_clients_leave_the_fraction_alone() -> None:
    for tenths in range(11):
        p = Fraction(tenths, 10)
        fraction = (5 * p) % 1
        assert variance_of_mean([p] * 5, 5) == fraction * (1 - fraction) / 25


def test_clients_in_one_place_vary_more_than_independent_ones() -> None:
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(9)
    numbers = draw(3, 10), coordinated_uniforms(ENTRIES, 3, 10, shared, own)
    both = torch.stack([(drawn < 0.5).double() for drawn in numbers]).mean(0)
    assert float(both.var()) > 1.5 * float(independent_variance([Fraction(1, 2)] * 2))


def expected_empty_subsets(num_rows: int, num_columns: int, degree: int, size: int) -> float:
    share = math.comb(num_columns - size, degree) / math.comb(num_columns, degree)
    return math.comb(num_columns, size) * share**num_rows


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), [(1, 3, 1), (2, 4, 2), (3, 4, 1), (2, 5, 3)])
def test_lemma_2_3_counts_empty_sets_and_is_not_their_distribution(num_rows, num_columns, degree):
    subsets = list(itertools.combinations(range(num_columns), degree))
    matrices = list(itertools.product(subsets, repeat=num_rows))
    empty = [num_columns - len(set(itertools.chain(*rows))) for rows in matrices]
    counted = [sum(math.comb(e, size) for e in empty) / len(matrices) for size in range(num_columns + 1)]
    formula = [expected_empty_subsets(num_rows, num_columns, degree, size) for size in range(num_columns + 1)]
    assert formula == pytest.approx(counted)
    assert sum(formula) > 1
    assert formula[1] == pytest.approx(num_columns * (1 - degree / num_columns) ** num_rows)


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), [(3, 6, 2), (20, 12, 1), (30, 30, 3)])
def test_drawn_matrices_have_so_many_empty_sets_of_columns(num_rows: int, num_columns: int, degree: int) -> None:
    count = BLOCK_ROWS // num_rows  # rows are independent, so a block is cut into many small matrices
    columns = torch.from_numpy(draw_rows(17, 0, count * num_rows, num_columns, degree)[0]).long().view(count, -1)
    empty = num_columns - torch.zeros(count, num_columns).scatter_(1, columns, 1.0).sum(1).long()
    for size in (1, 2, 3):
        sets = torch.tensor([math.comb(e, size) for e in empty.tolist()]).double()
        expected = expected_empty_subsets(num_rows, num_columns, degree, size)
        assert abs(sets.mean() - expected) <= 5 * sets.std() / math.sqrt(count)


@pytest.mark.parametrize(("clients", "server_lr"), [(10, 1.0), (4, 1.0), (10, 0.3)])
def test_disagreement_decays_as_in_a_population_of_clients(clients: int, server_lr: float) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.full((40_000,), 0.5, dtype=torch.float64)
    for _ in range(20):
        bits = torch.rand(clients, len(p), dtype=torch.float64, generator=generator) < p
        p += server_lr * (bits.double().mean(0) - p)
    # values lie in [0, 1/2], so a mean of 40,000 has a standard deviation of at most 1/4 / 200
    found, bound = float((2 * p * (1 - p)).mean()), 5 * 0.25 / math.sqrt(40_000)
    assert abs(found - 0.5 * (1 - server_lr**2 / clients) ** 20) < bound
    assert abs(found - 0.5 * (1 - server_lr**2 / (clients + 2)) ** 20) > bound  # of a larger population


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
    assert draw_rows(seed, block, num_rows, num_columns, degree, "sign")[1].tolist() == np.sign(slow_values).tolist()
    diagonal = draw_rows(seed, block, num_rows, num_columns, None)
    assert diagonal[0].tolist() == [[0]] * num_rows
    assert diagonal[1].ravel().tolist() == [v for row in slow_values for v in row][:num_rows]


@pytest.mark.slow
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
    assert np.abs(steps - np.floor(steps) - 0.5).min() > 1e-7
    assert np.array_equal(np.round(steps) / 2**20, matrix._table("normal")[2**15 :])


dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def scores_and_gradients(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Scores outside, at the edges of and inside [0, 1], each with a gradient of either sign and none."""
    scores = torch.tensor([-3.0, -0.1, 0.0, 0.2, 0.5, 0.9, 1.0, 1.1, 4.0], dtype=dtype).repeat_interleave(3)
    return scores, torch.tensor([-2.0, 0.0, 0.7], dtype=dtype).repeat(9)


@pytest.mark.parametrize("absorbing", [True, False])
def test_clip_passes_the_gradient_of_bits_inside_and_at_an_edge_only_if_it_leads_back_and_nothing_absorbs(absorbing):
    scores, of_bits = scores_and_gradients()
    expected = []
    for s, g in zip(scores.tolist(), of_bits.tolist(), strict=True):
        inside = 0 < s < 1
        comes_back = (s <= 0 and -g > 0) or (s >= 1 and -g < 0)  # a step of descent is in the direction of -g
        expected.append(g if inside or (comes_back and not absorbing) else 0.0)
    assert Clip(absorbing).gradient(scores, of_bits).tolist() == expected


@dtypes
def test_clip_clips_and_its_gradient_inside_is_that_of_autograd(dtype: torch.dtype) -> None:
    scores, of_bits = scores_and_gradients(dtype)
    assert Clip().probs(scores).tolist() == [min(max(s, 0.0), 1.0) for s in scores.tolist()]
    leaf = scores.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad(Clip().probs(leaf), leaf, of_bits)
    edge = (scores == 0) | (scores == 1)  # where the derivative is a convention
    assert torch.equal(Clip().gradient(scores, of_bits)[~edge], by_autograd[~edge])


@dtypes
def test_sigmoid_straight_through_has_the_gradient_of_autograd_and_the_other_one_p_times_as_much(dtype):
    scores, of_bits = scores_and_gradients(dtype)
    leaf = scores.clone().requires_grad_()
    probs = Sigmoid().probs(leaf)
    (by_autograd,) = torch.autograd.grad(probs, leaf, of_bits)
    # a sigmoid, a difference and three products round
    few = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(Sigmoid().gradient(scores, of_bits), by_autograd, rtol=few, atol=0)
    times_p = Sigmoid(straight_through=False).gradient(scores, of_bits)
    torch.testing.assert_close(times_p, by_autograd * probs.detach(), rtol=few, atol=0)
    torch.testing.assert_close(probs.detach(), 1 / (1 + torch.exp(-scores)), rtol=few, atol=0)


@dtypes
@pytest.mark.parametrize("link", [Clip(), Clip(False), Sigmoid()], ids=str)
def test_probabilities_come_back_from_their_scores_within_the_margin(link: Link, dtype: torch.dtype) -> None:
    probs = torch.linspace(0, 1, 101, dtype=dtype)
    margin = 0.01 if isinstance(link, Sigmoid) else 0.0
    scores = link.scores(probs)
    assert scores.isfinite().all()
    # the slope of a score is 1 / (p (1 - p)), that of a probability its inverse: both round some steps of |score| <= 10
    few = 0.0 if isinstance(link, Clip) else 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(link.probs(scores), probs.clamp(margin, 1 - margin), rtol=0, atol=few)


def test_scores_of_clip_are_a_copy() -> None:
    probs = torch.tensor([0.25])
    Clip().scores(probs).fill_(1.0)
    assert probs.tolist() == [0.25]


LAYERS = (  # of several blocks, of a few rows, of one block exactly and a row more
    LayerRows(seed=1, num_rows=BLOCK_ROWS + 5, scale=0.5),
    LayerRows(seed=2, num_rows=7, scale=2.0),
    LayerRows(seed=2**64 - 1, num_rows=BLOCK_ROWS + 1, scale=1.0),
)
SMALL = (LayerRows(seed=3, num_rows=30, scale=0.3), LayerRows(seed=4, num_rows=11, scale=3.0))

MATRICES = {
    "blocks": InfluenceMatrix(LAYERS, num_columns=40, degree=5),
    "full": InfluenceMatrix(SMALL, num_columns=6, degree=6),
    "signs": InfluenceMatrix(SMALL, num_columns=20, degree=3, values="sign"),
    "diagonal": InfluenceMatrix(SMALL, num_columns=41, degree=None),
    "diagonal signs": InfluenceMatrix(SMALL, num_columns=41, degree=None, values="sign"),
}
named = pytest.mark.parametrize("name", list(MATRICES))


def fresh(name: str, **changes: Any) -> InfluenceMatrix:
    """A copy that has drawn nothing yet."""
    return replace(MATRICES[name], **changes)


def dense(matrix: InfluenceMatrix) -> Tensor:
    columns, values = matrix.entries()
    return torch.zeros(matrix.num_rows, matrix.num_columns).double().scatter_(1, columns, values.double())


def vectors(matrix: InfluenceMatrix, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(matrix.num_columns, generator=generator, dtype=dtype)
    return z, torch.randn(matrix.num_rows, generator=generator, dtype=dtype)


def rounding(Q: Tensor, x: Tensor) -> Tensor:
    """What a sum of k products may lose, k eps sum |q x|, of each entry of Q x."""
    return (Q != 0).sum(1) * torch.finfo(x.dtype).eps * (Q.abs() @ x.double().abs())


@named
@dtypes
def test_products_are_those_of_the_dense_matrix(name: str, dtype: torch.dtype) -> None:
    matrix, Q = fresh(name), dense(fresh(name))
    z, g = vectors(matrix, dtype)
    weights, pulled = matrix.expand(z), matrix.pull_back(g)
    assert weights.dtype == pulled.dtype == dtype
    assert ((weights.double() - Q @ z.double()).abs() <= rounding(Q, z)).all()
    assert ((pulled.double() - Q.T @ g.double()).abs() <= rounding(Q.T, g)).all()
    # one is the adjoint of the other
    most = rounding(Q, z) @ g.double().abs() + rounding(Q.T, g) @ z.double().abs()
    assert abs(float(weights.double() @ g.double() - z.double() @ pulled.double())) <= float(most)


@named
def test_entries_are_the_rows_of_each_layer_scaled(name: str) -> None:
    matrix = fresh(name)
    columns, values = (part.split([layer.num_rows for layer in matrix.layers]) for part in matrix.entries())
    first_row = 0
    for layer, own_columns, own_values in zip(matrix.layers, columns, values, strict=True):
        for block, start in enumerate(range(0, layer.num_rows, BLOCK_ROWS)):
            size = min(BLOCK_ROWS, layer.num_rows - start)
            drawn = draw_rows(layer.seed, block, size, matrix.num_columns, matrix.degree, matrix.values)
            expected = (torch.from_numpy(part) for part in drawn)
            rows = slice(start, start + size)
            if matrix.degree is None:
                assert own_columns[rows].ravel().tolist() == list(range(first_row + start, first_row + start + size))
                next(expected)
            else:
                assert torch.equal(own_columns[rows], next(expected).long())
            assert torch.equal(own_values[rows], next(expected) * torch.tensor(layer.scale, dtype=torch.float32))
        first_row += layer.num_rows


@dtypes
def test_what_is_kept_changes_neither_products_nor_bounds_on_memory(dtype: torch.dtype) -> None:
    row, Q = 5 * 8 + 4, dense(MATRICES["blocks"])  # a column, a value, and where the row ends
    first_block = BLOCK_ROWS * row + 4
    kept_rows = {
        -1: 0,
        0: 0,
        first_block - 1: 0,
        first_block: BLOCK_ROWS,
        first_block + 12 * row: BLOCK_ROWS + 12,
        2**30: sum(layer.num_rows for layer in LAYERS),
    }
    for memory, expected in kept_rows.items():
        matrix = fresh("blocks", memory=memory)
        z, g = vectors(matrix, dtype)
        assert ((matrix.expand(z).double() - Q @ z.double()).abs() <= rounding(Q, z)).all()
        assert ((matrix.pull_back(g).double() - Q.T @ g.double()).abs() <= rounding(Q.T, g)).all()
        kept = matrix._kept
        assert kept.shape[0] == expected
        if expected:
            assert kept.data.nbytes + kept.indices.nbytes + kept.indptr.nbytes <= memory


def test_rows_of_a_layer_do_not_depend_on_the_layers_before_it() -> None:
    alone = InfluenceMatrix(SMALL[1:], num_columns=20, degree=3)
    for part, whole in zip(alone.entries(), InfluenceMatrix(SMALL, num_columns=20, degree=3).entries(), strict=True):
        assert torch.equal(part, whole[SMALL[0].num_rows :])
    other_seed = InfluenceMatrix((replace(SMALL[1], seed=5),), num_columns=20, degree=3)
    assert not torch.equal(other_seed.entries()[1], alone.entries()[1])  # negative control


def test_pickled_it_is_its_description_alone_and_draws_the_same() -> None:
    matrix = fresh("blocks")
    z, g = vectors(matrix, torch.float32)
    weights, pulled = matrix.expand(z), matrix.pull_back(g)
    matrix._on_device(z)
    sent = pickle.dumps(matrix)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received == matrix
    assert torch.equal(received.expand(z), weights)
    assert torch.equal(received.pull_back(g), pulled)


@named
def test_sparse_products_of_torch_are_those_of_scipy(name: str) -> None:
    """What other devices use, on the CPU; some rows are kept, others drawn again."""
    matrix, Q = fresh(name, memory=BLOCK_ROWS * 44 + 4), dense(fresh(name))
    z, g = vectors(matrix, torch.float32)
    pair = matrix._on_device(z)
    assert matrix._on_device(z)[0] is pair[0]  # kept
    try:
        weights, pulled = torch.mv(pair[0], z), torch.mv(pair[1], g)
    except RuntimeError as error:
        pytest.skip(f"this build of torch multiplies no sparse matrices on the CPU: {error}")
    assert ((weights - matrix.expand(z)).abs() <= 2 * rounding(Q, z)).all()
    assert ((pulled - matrix.pull_back(g)).abs() <= 2 * rounding(Q.T, g)).all()
    assert matrix._on_device(z.to("meta"))[0].is_meta  # another device has its own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_only_the_result_is_rounded(dtype: torch.dtype) -> None:
    matrix = fresh("signs")
    z, g = vectors(matrix, dtype)
    assert torch.equal(matrix.expand(z), matrix.expand(z.float()).to(dtype))
    assert torch.equal(matrix.pull_back(g), matrix.pull_back(g.float()).to(dtype))


def test_bits_may_be_booleans_or_floats_and_need_no_gradient() -> None:
    matrix = fresh("signs")
    bits = vectors(matrix, torch.float32)[0] < 0.5
    weights = matrix.expand(bits)
    assert weights.dtype == torch.float32
    assert torch.equal(weights, matrix.expand(bits.float().requires_grad_()))
    assert not weights.requires_grad


def test_a_degree_beyond_the_columns_and_a_diagonal_that_is_not_square_are_refused() -> None:
    for degree in (0, 7):
        with pytest.raises(ValueError, match=f"between 1 and the number of columns, 6, got {degree}: .* Lower the"):
            InfluenceMatrix(SMALL, num_columns=6, degree=degree)
    with pytest.raises(ValueError, match="diagonal matrix of 41 rows has 40 columns"):
        InfluenceMatrix(SMALL, num_columns=40, degree=None)
