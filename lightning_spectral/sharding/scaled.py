"""Scaled: a client's sub-model has the Frobenius norm of the whole weight."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_magnitudes
from lightning_spectral.sharding.base import ShardingStrategy


@dataclass(frozen=True)
class Scaled(ShardingStrategy):
    r"""Another strategy's draws, with one multiplier for all drawn terms that preserves the Frobenius norm.

    :math:`\omega = \sqrt{\sum_k s_k^2 / \sum_{k \in I} s_k^2}`: it depends on the drawn terms I and is known only after
    the draw (`drawn_multipliers`).

    Args:
        strategy: The strategy that sets the inclusion probabilities.

    Reference:
        Korzhenkov & Louizos (2024), section 4.1, "+Scaled".

    Example:
        >>> from lightning_spectral.sharding import TopN
        >>> s = torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64)
        >>> Scaled(TopN()).drawn_multipliers(s, torch.ones(3), torch.tensor([0, 1]))
        tensor([2.6000, 2.6000], dtype=torch.float64)
    """

    strategy: ShardingStrategy

    def __post_init__(self) -> None:
        check_is("strategy", self.strategy, ShardingStrategy)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        r"""The other strategy's inclusion probabilities, and the multipliers of the expected draw."""
        probs, _ = self.strategy(singular_values, num_terms, cohort_size)
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return probs, torch.full_like(probs, _norm_ratio(squares.sum(), (probs * squares).sum()))

    def drawn_multipliers(self, singular_values: Tensor, multipliers: Tensor, terms: Tensor) -> Tensor:
        """Norm of the whole weight divided by the norm of the drawn part, for each drawn term."""
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return torch.full((len(terms),), _norm_ratio(squares.sum(), squares[terms].sum()), dtype=torch.float64)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        """Return the other strategy's figures."""
        return self.strategy.figures(singular_values, num_terms, cohort_size)

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        """Return the other strategy's design."""
        return self.strategy.own_design(singular_values, num_terms)


def _norm_ratio(whole: Tensor, part: Tensor) -> float:
    return float((whole / part).sqrt()) if part > 0 else 1.0  # all drawn terms are zero: nothing to scale
