"""The errors of a client's sub-model and of a cohort's average, one term after another."""

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, collective_multipliers

Plan = tuple[Tensor, Tensor]


def random_spectrum(seed: int, size: int) -> Tensor:
    """A random spectrum, from nearly flat to a decay over many decades."""
    generator = torch.Generator().manual_seed(seed)
    power = 3 * torch.rand((), generator=generator, dtype=torch.float64)
    noise = torch.rand(size, generator=generator, dtype=torch.float64)
    return noise.add(0.5) / torch.arange(1, size + 1, dtype=torch.float64) ** power


def slow_errors(values: Tensor, plan: Plan, cohort_size: float) -> tuple[float, float]:
    """Squared bias plus variance of one client's sub-model and of the average of C, term by term."""
    client = cohort = 0.0
    for s, pi, omega in zip(values.tolist(), plan[0].tolist(), plan[1].tolist(), strict=True):
        bias, variance = 1 - omega * pi, omega**2 * pi * (1 - pi)
        client += s**2 * (bias**2 + variance)
        cohort += s**2 * (bias**2 + variance / cohort_size)
    return client, cohort


def plan_for(values: Tensor, n: int, size: float) -> Plan:
    probs = collective_inclusion_probs(values, n, size)
    return probs, collective_multipliers(probs, size)
