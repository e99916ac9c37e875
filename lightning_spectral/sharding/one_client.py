"""Strategies that treat each client on its own: top-n, unbiased, and another strategy's draws scaled."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import check_fields
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_magnitudes
from lightning_spectral.functional.sampling.inclusion import proportional_inclusion_probs, top_inclusion_probs
from lightning_spectral.functional.sampling.schatten import ORDER, schatten_inclusion_probs
from lightning_spectral.sharding.base import ShardingStrategy


@dataclass(frozen=True)
class TopN(ShardingStrategy):
    """All clients hold the n terms with the largest singular values (ties by position), unscaled, as in FedHM.

    The sub-model is the best approximation of rank n, but the other terms are never trained.

    Example:
        >>> TopN()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=10)[0]
        tensor([1., 1., 0.], dtype=torch.float64)
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = top_inclusion_probs(singular_values.double(), num_terms)
        return probs, torch.ones_like(probs)


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
        probs = proportional_inclusion_probs(singular_values.double(), num_terms)
        return probs, inverse_probs(probs)


def inverse_probs(inclusion_probs: Tensor) -> Tensor:
    """Horvitz-Thompson multipliers 1 / pi; 1 for terms that are never drawn, and finite for any pi."""
    smallest = torch.finfo(inclusion_probs.dtype).tiny
    return torch.where(inclusion_probs > 0, inclusion_probs.clamp_min(smallest), 1.0).reciprocal()


@dataclass(frozen=True)
class Schatten(ShardingStrategy):
    r"""Multipliers :math:`1/\pi_i`, and the :math:`\pi` with the least bound on the expected Schatten p-norm error.

    For p = 2 this is `Unbiased`. Small terms keep nearly the same proportions for any p; a larger p takes probability
    from large terms that are not yet certain and gives it to small ones, whose omission costs more.

    Args:
        p: Order of the norm, at least 2; the paper reports 4.

    Note:
        The paper optimises numerically and finds larger p unstable. The problem is convex and separable, so it is
        solved exactly here; nothing can fail to converge, and there is no fallback.

    Reference:
        Korzhenkov & Louizos (2024), appendix A, Eq. (10) and Table 5.

    Example:
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> Schatten(p=4)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.4541, 0.2730, 0.2730], dtype=torch.float64)
    """

    p: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self, p=ORDER)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = schatten_inclusion_probs(singular_values.double(), num_terms, self.p)
        return probs, inverse_probs(probs)


@dataclass(frozen=True)
class Scaled(ShardingStrategy):
    r"""Another strategy's draws, with one multiplier for all drawn terms that preserves the Frobenius norm.

    :math:`\omega = \sqrt{\sum_k s_k^2 / \sum_{k \in I} s_k^2}`: it depends on the drawn terms I and is known only after
    the draw (`drawn_multipliers`); before, the multiplier is that of the expected draw.

    Args:
        strategy: The strategy that sets the inclusion probabilities.

    Reference:
        Korzhenkov & Louizos (2024), section 4.1, "+Scaled".

    Example:
        >>> s = torch.tensor([3.0, 4.0, 12.0], dtype=torch.float64)
        >>> Scaled(TopN()).drawn_multipliers(s, torch.ones(3), torch.tensor([0, 1]))
        tensor([2.6000, 2.6000], dtype=torch.float64)
    """

    strategy: ShardingStrategy

    def __post_init__(self) -> None:
        check_is("strategy", self.strategy, ShardingStrategy)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs, _ = self.strategy(singular_values, num_terms, cohort_size)
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return probs, torch.full_like(probs, _norm_ratio(squares.sum(), (probs * squares).sum()))

    def drawn_multipliers(self, singular_values: Tensor, multipliers: Tensor, terms: Tensor) -> Tensor:
        squares = as_magnitudes(singular_values, "singular_values") ** 2
        return torch.full((len(terms),), _norm_ratio(squares.sum(), squares[terms].sum()), dtype=torch.float64)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        return self.strategy.figures(singular_values, num_terms, cohort_size)

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        return self.strategy.own_design(singular_values, num_terms)


def _norm_ratio(whole: Tensor, part: Tensor) -> float:
    return float((whole / part).sqrt()) if part > 0 else 1.0  # all drawn terms are zero: nothing to scale
