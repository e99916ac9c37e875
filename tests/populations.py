"""Small populations with gaps, and the enumeration of everything that could be drawn from them."""

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_spectral.participation import (
    LossVarianceReduced,
    Population,
    Sampler,
    StaleUpdateVarianceReduced,
    Uniform,
    UpdateVarianceReduced,
    outcome_to_assignment,
)

MIXED = Population(torch.tensor([[30, 10, 5], [10, 0, 7]]), processors=torch.tensor([3, 1]))
GAPS = Population(
    torch.tensor([[30, 10], [4, 5], [10, 3], [2, 8]]),
    processors=torch.tensor([1, 1, 1, 1]),
    available=torch.tensor([[True, True], [False, False], [True, False], [True, True]]),
)
ONE_MODEL = Population(torch.tensor([[30], [10]]), processors=torch.tensor([2, 2]))
POPULATIONS = [MIXED, GAPS, ONE_MODEL]

DRAWN: list[Sampler] = [
    Uniform(active=1.5),
    LossVarianceReduced(active=2),
    UpdateVarianceReduced(active=2.5),
    StaleUpdateVarianceReduced(active=0.5),
]


def some_figures(population: Population, seed: int = 0) -> Tensor:
    """Positive figures, some of which are unknown."""
    generator = torch.Generator().manual_seed(seed)
    figures = torch.rand(population.num_examples.shape, dtype=torch.float64, generator=generator) + 0.1
    figures[0, 0] = math.nan
    return figures


def outcomes(probs: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every combination of what independent processors draw, with its probability."""
    rows = [[(float(1 - row.sum()), -1), *((float(p), s) for s, p in enumerate(row) if p > 0)] for row in probs]
    for outcome in itertools.product(*rows):
        yield math.prod(p for p, _ in outcome), torch.tensor([choice for _, choice in outcome])


def expected_average(population: Population, sampler: Sampler, values: Tensor, round_idx: int = 0) -> Tensor:
    """Expectation of sum c * x for each model, over everything that could be drawn; values (N, S)."""
    scores = sampler.scores(population, some_figures(population))
    probs = sampler.probs(scores, round_idx)
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for chance, choice in outcomes(probs):
        assignment = outcome_to_assignment(population, sampler.long_run_probs(scores, probs), choice)
        for client, model, coefficient in zip(
            assignment.clients, assignment.models, assignment.coefficients, strict=True
        ):
            total[model] += chance * coefficient * values[client, model]
    return total


def random_values(population: Population, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(population.num_examples.shape, dtype=torch.float64, generator=generator)
