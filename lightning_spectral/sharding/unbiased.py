"""Unbiased: each client's estimator is right on average, with the least error."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.inclusion import proportional_inclusion_probs
from lightning_spectral.sharding.base import ShardingStrategy


@dataclass(frozen=True)
class Unbiased(ShardingStrategy):
    r"""Horvitz-Thompson: :math:`\pi_i = \min(1, c\,s_i)` and multipliers :math:`1 / \pi_i`.

    Each client's sub-model equals the full weight on average, with the least Frobenius error that this
    allows. Multipliers of small terms can be large; clip the learning rate (``EffectiveLRClip``).

    Note:
        Terms that are never drawn, those of singular value zero, get multiplier 1, so that all multipliers are finite.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.1 and Algorithm 1.

    Example:
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> Unbiased()(s, num_terms=2, cohort_size=10)[1]
        tensor([1., 2., 4., 4.], dtype=torch.float64)
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """Capped proportional probabilities and their inverses."""
        probs = proportional_inclusion_probs(singular_values.double(), num_terms)
        return probs, inverse_probs(probs)


def inverse_probs(inclusion_probs: Tensor) -> Tensor:
    """Horvitz-Thompson multipliers 1 / pi; 1 for terms that are never drawn, and finite for any pi.

    Example:
        >>> inverse_probs(torch.tensor([1.0, 0.25, 0.0]))
        tensor([1., 4., 1.])
    """
    smallest = torch.finfo(inclusion_probs.dtype).tiny
    return torch.where(inclusion_probs > 0, inclusion_probs.clamp_min(smallest), 1.0).reciprocal()
