"""Shares, processors and gaps of a population, and what it refuses."""

import pytest
import torch
from populations import GAPS, MIXED, POPULATIONS
from torch import Tensor

from lightning_spectral.participation import Population


def test_shares_count_only_clients_that_can_train() -> None:
    # client 1 is not available; client 2 only for model 0
    expected = torch.tensor([[30 / 42, 10 / 18], [0, 0], [10 / 42, 0], [2 / 42, 8 / 18]], dtype=torch.float64)
    assert torch.allclose(GAPS.shares, expected, rtol=1e-15, atol=0)
    assert GAPS.can.tolist() == [[True, True], [False, False], [True, False], [True, True]]


def test_processors_of_a_client_are_adjacent_and_share_its_weight() -> None:
    assert MIXED.owner.tolist() == [0, 0, 0, 1]
    assert torch.equal(MIXED.weights[0], MIXED.shares[0] / 3)
    assert torch.equal(MIXED.weights[3], MIXED.shares[1])
    for population in POPULATIONS:
        assert torch.allclose(population.weights.sum(0), torch.ones(1).double(), rtol=1e-15, atol=0)


ONES = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("num_examples", "processors", "available", "message"),
    [
        (torch.ones(3).long(), ONES, None, r"`num_examples` must have shape \(N, S\) with N, S >= 1, got shape \(3,\)"),
        (torch.ones(3, 0).long(), ONES, None, r"got shape \(3, 0\)"),
        (torch.ones(3, 2), ONES, None, "`num_examples` must have .* type torch.int64, got .* torch.float32"),
        (torch.ones(2, 2).long(), ONES, None, r"`processors` must have shape \(2,\) .* got shape \(3,\)"),
        (torch.ones(3, 2).long(), ONES, torch.ones(2, 2).bool(), r"`available` must have shape \(3, 2\)"),
        (torch.ones(3, 2).long(), ONES, torch.ones(3, 2), "`available` must have .* type torch.bool"),
        (torch.tensor([[1], [-2], [1]]), ONES, None, "must not be negative, got -2 of client 1, model 0"),
        (torch.ones(3, 2).long(), torch.tensor([1, 0, -1]), None, "at least 1, got less for clients 1, 2"),
        (torch.tensor([[1, 0], [1, 0], [1, 0]]), ONES, None, "no client can train model 1; add examples"),
        (torch.ones(3, 2).long(), ONES, torch.zeros(3, 2).bool(), "no client can train models 0, 1;"),
    ],
)
def test_bad_populations_are_refused(
    num_examples: Tensor, processors: Tensor, available: Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Population(num_examples, processors, available)


def test_of_many_clients_the_first_are_named() -> None:
    with pytest.raises(ValueError, match=r"clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 5 more\."):
        Population(torch.ones(15, 1).long(), torch.zeros(15).long())
