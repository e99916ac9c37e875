"""Samplers that prefer the clients and models that contribute most to the variance of an average."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.functional.sampling.assignment import assignment_probs
from lightning_spectral.participation.sampler import Figure, Sampler

__all__ = ["LossVarianceReduced", "StaleUpdateVarianceReduced", "UpdateVarianceReduced", "VarianceReduced"]


@dataclass(frozen=True)
class VarianceReduced(Sampler):
    """The base of the three samplers: probabilities with the least total variance of their weighted figures.

    See :func:`~lightning_spectral.functional.assignment_probs`.

    Args:
        active: Expected number m of active processors in a round, above zero.
        design: Fixed-size design by which exactly m processors are drawn, or as many as have a positive score, if that
            is less; by default each processor draws independently. See :class:`Sampler`.
        normalize: See :class:`Sampler`.
        measure: Whose figures are measured before a round: all clients' (``"all"``, as published), no client's
            (``"last"``, which uses the last known values), or those of a random sample of this many clients, at least
            1.
    """

    measure: Literal["all", "last"] | int = "all"

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

    Measuring an update means training: with ``measure="all"``, all clients train every model in every round, and only
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
