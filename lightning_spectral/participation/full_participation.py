"""Every client trains every model."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_spectral.arguments import check_fields, flag
from lightning_spectral.participation.assignment import Assignment
from lightning_spectral.participation.population import Population
from lightning_spectral.participation.sampler import Sampler

__all__ = ["FullParticipation"]


@dataclass(frozen=True)
class FullParticipation(Sampler):
    """Every client trains every model that it can in every round, whatever its number of processors.

    This is the reference that other samplers approximate; nothing is drawn. All processors count as active for every
    model they can train, so rows of the probabilities sum to more than one.

    Args:
        normalize: Whether coefficients are numbers of examples, to be divided by their sum, instead of shares. Both
            give the same average.

    Reference:
        The baseline "Full Participation" of Zhang et al. (2024).

    Example:
        >>> population = Population(torch.tensor([[30, 10], [10, 0]]), processors=torch.tensor([1, 1]))
        >>> assignment = FullParticipation().assign(population, None, 0, torch.Generator())
        >>> assignment.clients, assignment.models, assignment.coefficients
        ([0, 0, 1], [0, 1, 0], [0.75, 1.0, 0.25])
    """

    active: float = field(default=math.inf, init=False, repr=False)
    design: None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self, normalize=flag)

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        """One wherever a processor has a score."""
        return (scores > 0).double()

    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        """All pairs, in the order of clients, then models; see :meth:`Sampler.assign`."""
        clients, models = population.trainable.nonzero(as_tuple=True)
        coefficients = population.num_examples.double() if self.normalize else population.shares
        pairs = clients.tolist(), models.tolist(), coefficients[clients, models].tolist()
        return Assignment(population.can.double(), *pairs, active=population.can.sum(0))

    def check(self, population: Population) -> None:
        """Accept every population."""
