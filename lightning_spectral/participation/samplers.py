"""Samplers: everyone, anyone, models that take turns, and those that prefer clients that add most to the variance."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields, flag
from lightning_spectral.functional.sampling.inclusion import assignment_probs
from lightning_spectral.participation.sampler import Assignment, Figure, Population, Sampler


@dataclass(frozen=True)
class FullParticipation(Sampler):
    """Every client trains every model that it can in every round, whatever its number of processors.

    This is the reference that other samplers approximate; nothing is drawn. All processors count as active for every
    model they can train, so rows of the probabilities sum to more than one. Pairs are in the order of clients, then
    models.

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
        return (scores > 0).double()

    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        clients, models = population.trainable.nonzero(as_tuple=True)
        coefficients = population.num_examples.double() if self.normalize else population.shares
        pairs = clients.tolist(), models.tolist(), coefficients[clients, models].tolist()
        return Assignment(population.can.double(), *pairs, active=population.can.sum(0))

    def check(self, population: Population) -> None:
        """Accept every population."""


@dataclass(frozen=True)
class Uniform(Sampler):
    """Every processor that can train something is equally likely to be active, with any of the models it can train.

    With a design, one model and one processor per client, it draws the same cohort as
    :class:`~lightning_spectral.participation.UniformParticipation`; with ``normalize``, its coefficients are the
    numbers of examples too.

    Args:
        active: Expected number m of active processors in a round, above zero.
        design: Fixed-size design, see :class:`Sampler`. As all processors are equally likely, the choice makes no
            difference.
        normalize: See :class:`Sampler`.

    Reference:
        The baseline "Random" of Zhang et al. (2024).

    Example:
        >>> Uniform(active=1).probs(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        tensor([[0.2500, 0.2500],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return uniform_probs(scores > 0, self.active)


def uniform_probs(can: Tensor, active: float) -> Tensor:
    """Probabilities with equal row sums, each shared equally among a processor's models, float64, shape ``(P, S)``.

    Args:
        can: Which processor can train which model, bool, shape ``(P, S)``.
        active: Sum m of all probabilities; no more than the number of processors that can train something.
    """
    counts = can.sum(1, keepdim=True)
    chance = min(1.0, active / max(int((counts > 0).sum()), 1))
    return torch.where(can, chance / counts.clamp(min=1).double(), 0.0)


@dataclass(frozen=True)
class RoundRobin(Sampler):
    """Every processor is equally likely to be active; the model it then trains rotates.

    In round t, processor p trains model number (p + t) mod c of the c models that it can train.

    Its arguments are those of :class:`Uniform`.

    Note:
        Coefficients are divided by the probability over many rounds, which is that of :class:`Uniform`. At fixed
        weights, the average over a cycle (as many rounds as the least common multiple of all c) is therefore unbiased.
        A single round is not: clients whose turn it is not are missing from a model, whoever is drawn. Variance figures
        computed from the assignment's probabilities are those of :class:`Uniform`.

    Reference:
        Bhuyan, Moharir & Joshi (2022), "Multi-Model Federated Learning with Provable Guarantees".

    Example:
        >>> sampler, everything = RoundRobin(active=1), torch.ones(2, 2)
        >>> sampler.probs(everything, round_idx=0)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
        >>> sampler.probs(everything, round_idx=1)
        tensor([[0.0000, 0.5000],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        can = scores > 0
        counts = can.sum(1, keepdim=True)
        turn = (torch.arange(len(can))[:, None] + round_idx) % counts.clamp(min=1)
        on_turn = can & (can.cumsum(1) - 1 == turn)
        return uniform_probs(on_turn, self.active)

    def long_run_probs(self, scores: Tensor, probs: Tensor) -> Tensor:
        return uniform_probs(scores > 0, self.active)


@dataclass(frozen=True)
class VarianceReduced(Sampler):
    """The base of the three samplers: probabilities with the least total variance of their weighted figures.

    See `assignment_probs`.

    Args:
        active: Expected number m of active processors in a round, above zero.
        design: Fixed-size design by which exactly m processors are drawn, or as many as have a positive score, if that
            is less; by default each processor draws independently. See :class:`Sampler`.
        normalize: See :class:`Sampler`.
        measure: Whose figures are measured before a round: those of a random sample of this many clients, at least 1,
            or of all if there are no more; all clients' (``"all"``, as published); or no client's (``"last"``, which
            uses the last known values).
    """

    measure: Literal["all", "last"] | int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (isinstance(self.measure, str) and self.measure in ("all", "last")):
            check_fields(self, measure=Whole(at_least=1, hint='it is "all", "last" or a number of clients'))

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return assignment_probs(scores, min(self.active, len(scores)))


@dataclass(frozen=True)
class LossVarianceReduced(VarianceReduced):
    """MMFL-LVR: sampling by the clients' losses, which cost no more than one pass over their data.

    A client whose loss is zero is not drawn. Its arguments are those of :class:`VarianceReduced`.

    Reference:
        Zhang et al. (2024), "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated Learning".

    Example:
        >>> import torch
        >>> LossVarianceReduced(active=1).probs(torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
        tensor([[0.2500, 0.2500],
                [0.0000, 0.5000]], dtype=torch.float64)
    """

    figure: ClassVar[Figure] = "loss"


@dataclass(frozen=True)
class UpdateVarianceReduced(VarianceReduced):
    """MMFL-GVR: sampling by the norms of the clients' updates, which has the least variance of the average update.

    Measuring an update means training: all clients that are measured train every model in every round, and only
    communication is saved. Its arguments are those of :class:`VarianceReduced`.

    Reference:
        Zhang et al. (2024), Eq. (5).

    Example:
        >>> UpdateVarianceReduced(active=1, measure="last")
        UpdateVarianceReduced(active=1, design=None, normalize=False, measure='last')
    """

    figure: ClassVar[Figure] = "update"


@dataclass(frozen=True)
class StaleUpdateVarianceReduced(VarianceReduced):
    """MMFL-GVR*: sampling by how far the clients' updates are from the last ones that the server has stored.

    It suits an algorithm that keeps these stale updates and averages only the differences. Its arguments are those of
    :class:`VarianceReduced`.

    Reference:
        Zhang et al. (2024); Jhunjhunwala et al. (2022), FedVARP.

    Example:
        >>> StaleUpdateVarianceReduced(active=1).figure
        'stale update'
    """

    figure: ClassVar[Figure] = "stale update"
