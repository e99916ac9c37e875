"""Why probabilities settle although nobody trains: bits of few clients drift, as genes do in a small population."""

import math

import pytest
import torch

from lightning_spectral.functional.zampling.theory import expected_heterozygosity


def simulate(clients: int, server_lr: float, num_rounds: int, entries: int = 40_000) -> float:
    """Mean of 2 p (1 - p) after some rounds in which scores stay where they are."""
    generator = torch.Generator().manual_seed(0)
    p = torch.full((entries,), 0.5, dtype=torch.float64)
    for _ in range(num_rounds):
        bits = torch.rand(clients, entries, dtype=torch.float64, generator=generator) < p
        p += server_lr * (bits.double().mean(0) - p)
    return float((2 * p * (1 - p)).mean())


@pytest.mark.parametrize(("clients", "server_lr"), [(10, 1.0), (4, 1.0), (10, 0.3)])
def test_disagreement_decays_as_in_a_population_of_clients(clients: int, server_lr: float) -> None:
    for num_rounds in (1, 5, 20):
        expected = expected_heterozygosity(0.5, clients, num_rounds, server_lr)
        # values lie in [0, 1/2], so a mean of 40,000 has a standard deviation of at most 1/4 / 200
        assert abs(simulate(clients, server_lr, num_rounds) - expected) < 5 * 0.25 / math.sqrt(40_000)


def test_a_population_of_another_size_fails_the_same_check() -> None:
    wrong = expected_heterozygosity(0.5, 12, 20, 1.0)
    assert abs(simulate(10, 1.0, 20) - wrong) > 5 * 0.25 / math.sqrt(40_000)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="`server_lr` must be in"):
        expected_heterozygosity(0.5, 10, 1, server_lr=1.5)
