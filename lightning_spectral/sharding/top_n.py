"""Top-n: every client holds the largest terms."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.inclusion import top_inclusion_probs
from lightning_spectral.sharding.base import ShardingStrategy


@dataclass(frozen=True)
class TopN(ShardingStrategy):
    """All clients hold the n terms with the largest singular values, unscaled, as in FedHM.

    The sub-model is the best approximation of rank n, but the other terms are never trained.

    Example:
        >>> TopN()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=10)[0]
        tensor([1., 1., 0.], dtype=torch.float64)
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """One for the n largest values (ties by position), zero for the others; all multipliers are one."""
        probs = top_inclusion_probs(singular_values.double(), num_terms)
        return probs, torch.ones_like(probs)
