"""Formulas that the page on Zampling gives: corrections of the paper, and why bits settle although nobody trains."""

import itertools
import math

import pytest
import torch

from lightning_spectral.functional.zampling import BLOCK_ROWS, draw_rows


def expected_empty_subsets(num_rows: int, num_columns: int, degree: int, size: int) -> float:
    share = math.comb(num_columns - size, degree) / math.comb(num_columns, degree)
    return math.comb(num_columns, size) * share**num_rows


@pytest.mark.parametrize(("num_rows", "num_columns", "degree"), [(1, 3, 1), (2, 4, 2), (3, 4, 1), (2, 5, 3)])
def test_lemma_2_3_counts_empty_sets_and_is_not_their_distribution(
    num_rows: int, num_columns: int, degree: int
) -> None:
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
