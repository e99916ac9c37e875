"""Coordinated sampling: the clients of a group share the terms evenly."""

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign, Prepared
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.coordinated import coordinated_multipliers, draw_coordinated


@dataclass(frozen=True)
class Coordinated(Design):
    r"""Exact size and inclusion probabilities for each client, and term counts of :math:`C\pi_i` rounded down or up.

    The rows of one draw are the clients of one group and depend on each other: what one client lacks, another holds.
    Their average is closer to the weight than that of independent clients with the same probabilities.

    Note:
        The multipliers are the best for these counts and replace the strategy's.

    Example:
        >>> import torch
        >>> rows = Coordinated().sample(torch.tensor([0.5, 0.25, 0.25]), num_samples=4, generator=torch.Generator())
        >>> rows.flatten().bincount()
        tensor([2, 1, 1])
    """

    draws_cohort = True

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Check the probabilities; there is nothing to fit."""
        return Prepared(draw_coordinated, as_inclusion_probs(inclusion_probs)[0])

    def multipliers(self, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: int) -> Tensor:
        """The best multipliers for coordinated counts; see `coordinated_multipliers`."""
        return coordinated_multipliers(inclusion_probs, cohort_size)
