"""Formulas of the paper against influence matrices that are drawn, and enumerated where they are tiny.

Rows are independent, so one block of them is cut into many small matrices.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.zampling.influence import BLOCK_ROWS, draw_rows
from lightning_spectral.functional.zampling.matrix import InfluenceMatrix, LayerRows
from lightning_spectral.functional.zampling.theory import (
    column_degree_probability,
    expected_empty_columns,
    expected_empty_subsets,
    expected_hypercube_dimension,
    expected_nonzero_weights,
    largest_weight_bounds,
)

SHAPES = [(3, 6, 2), (20, 12, 1), (30, 30, 3), (25, 10, 1)]  # rows, columns, degree


def column_degrees(num_rows: int, num_columns: int, degree: int) -> Tensor:
    """Number of entries of each column, one row for each of several hundred matrices or more."""
    count = BLOCK_ROWS // num_rows
    columns = torch.from_numpy(draw_rows(17, 0, count * num_rows, num_columns, degree)[0]).long()
    return (
        torch.zeros(count, num_columns)
        .double()
        .scatter_add_(1, columns.view(count, -1), torch.ones(1).expand(count, num_rows * degree).double())
    )


def agrees(samples: Tensor, expected: float) -> bool:
    """Whether the mean of independent samples is within five standard errors."""
    error = float(samples.double().std()) / math.sqrt(len(samples))
    return abs(float(samples.double().mean()) - expected) <= 5 * error


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), SHAPES)
def test_so_many_columns_are_empty(num_rows: int, num_columns: int, degree: int) -> None:
    empty = (column_degrees(num_rows, num_columns, degree) == 0).sum(1)
    expected = expected_empty_columns(num_rows, num_columns, degree)
    assert agrees(empty, expected)
    assert not agrees(empty, expected_empty_columns(num_rows, num_columns, degree + 1))  # negative control
    assert expected_empty_subsets(num_rows, num_columns, degree, size=1) == pytest.approx(expected)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), [(3, 6, 2), (20, 12, 1), (30, 30, 3)])
def test_so_many_sets_of_columns_are_empty(num_rows: int, num_columns: int, degree: int, size: int) -> None:
    empty = (column_degrees(num_rows, num_columns, degree) == 0).sum(1)
    sets = torch.tensor([math.comb(count, size) for count in empty.tolist()])
    assert agrees(sets, expected_empty_subsets(num_rows, num_columns, degree, size))


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), [(1, 3, 1), (2, 4, 2), (3, 4, 1), (2, 5, 3)])
def test_empty_sets_are_counted_and_not_their_probability(num_rows: int, num_columns: int, degree: int) -> None:
    """Of all matrices; the counts of some shapes exceed 1, so the formula printed as a distribution is none."""
    subsets = list(itertools.combinations(range(num_columns), degree))
    matrices = list(itertools.product(subsets, repeat=num_rows))
    empty = [num_columns - len(set(itertools.chain(*rows))) for rows in matrices]
    counted = [sum(math.comb(e, size) for e in empty) / len(matrices) for size in range(num_columns + 1)]
    formula = [expected_empty_subsets(num_rows, num_columns, degree, size) for size in range(num_columns + 1)]
    assert formula == pytest.approx(counted)
    assert sum(formula) > 1
    exactly = [empty.count(size) / len(matrices) for size in range(num_columns + 1)]  # the distribution
    assert formula != pytest.approx(exactly)
    assert expected_empty_columns(num_rows, num_columns, degree) == pytest.approx(formula[1])


def test_more_columns_than_the_degree_leaves_are_never_all_empty() -> None:
    assert expected_empty_subsets(4, 5, degree=3, size=3) == 0.0
    assert expected_empty_subsets(4, 5, degree=3, size=0) == 1.0


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), SHAPES)
def test_the_degree_of_a_column_is_binomial(num_rows: int, num_columns: int, degree: int) -> None:
    degrees = column_degrees(num_rows, num_columns, degree)
    probabilities = [column_degree_probability(num_rows, num_columns, degree, k) for k in range(num_rows + 1)]
    assert sum(probabilities) == pytest.approx(1.0)
    assert sum(k * p for k, p in enumerate(probabilities)) == pytest.approx(num_rows * degree / num_columns)
    for column in (0, num_columns // 2, num_columns - 1):
        for count, probability in enumerate(probabilities):
            seen = float((degrees[:, column] == count).double().mean())
            error = math.sqrt(probability * (1 - probability) / len(degrees))
            # or a single one, where less than one is expected
            assert abs(seen - probability) <= max(5 * error, 1 / len(degrees)), (column, count)


@pytest.mark.parametrize("degree", [1, 2, 5])
def test_so_many_weights_are_not_zero(degree: int) -> None:
    """Of bits whose probabilities are uniform. Weights of one matrix share bits, so each matrix is one sample."""
    generator = torch.Generator().manual_seed(degree)
    num_rows, num_columns, counts = 60, 25, []
    for seed in range(300):
        matrix = InfluenceMatrix((LayerRows(seed, num_rows, 0.1),), num_columns, degree)
        probs = torch.rand(num_columns, generator=generator)
        bits = torch.rand(num_columns, generator=generator) < probs
        counts.append(int(matrix.expand(bits.float()).count_nonzero()))
    assert agrees(torch.tensor(counts), expected_nonzero_weights(num_rows, degree))


@pytest.mark.parametrize("degree", [1, 2, 6, 50])
def test_the_largest_weight_is_within_its_bounds(degree: int) -> None:
    scale = 0.3
    matrix = InfluenceMatrix((LayerRows(5, BLOCK_ROWS, scale),), num_columns=60, degree=degree)
    values = matrix.entries()[1].double()
    largest = torch.maximum(values.clamp(min=0).sum(1), -values.clamp(max=0).sum(1))
    if degree <= 6:  # |Qp| is convex in p, so it is largest at some corner of the cube
        corners = torch.tensor(list(itertools.product([0.0, 1.0], repeat=degree))).double()
        torch.testing.assert_close((values @ corners.T).abs().amax(1), largest)
    low, high = largest_weight_bounds(degree, scale)
    error = float(largest.std()) / math.sqrt(len(largest))
    assert low - 5 * error <= float(largest.mean()) <= high + 5 * error
    assert agrees(values.abs().sum(1), high)
    assert low == high / 2
    if degree == 1:
        assert agrees(largest, high)  # the upper bound is reached


def test_a_weight_of_many_values_is_nearer_to_the_lower_bound() -> None:
    """Positive and negative values then weigh the same: the bound is tight, up to some 1 / sqrt(d)."""
    values = InfluenceMatrix((LayerRows(6, 2000, 1.0),), num_columns=500, degree=400).entries()[1].double()
    largest = torch.maximum(values.clamp(min=0).sum(1), -values.clamp(max=0).sum(1))
    low, _ = largest_weight_bounds(400, 1.0)
    # max(a, b) is (a + b) / 2 + |a - b| / 2, and a - b is the sum of 400 standard normal values
    assert agrees(largest, low + 0.5 * math.sqrt(400 * 2 / math.pi))


@pytest.mark.parametrize("tau", [0.0, 0.1, 0.25, 0.49, 0.5])
def test_so_many_probabilities_are_inside_the_cube(tau: float) -> None:
    probs = torch.rand(2000, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inside = ((probs > tau) & (probs < 1 - tau)).sum(1)
    assert agrees(inside, expected_hypercube_dimension(50, tau))


@pytest.mark.parametrize("tau", [-0.01, 0.51, float("nan")])
def test_a_cube_that_is_inside_out_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="`tau` must be between 0 and 1/2, got"):
        expected_hypercube_dimension(50, tau)
