"""Strategies that treat each client on its own: top-n, unbiased, PriSM, and another strategy's draws scaled."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, OneOf, check_fields
from lightning_spectral.designs import Design, SuccessiveSampling
from lightning_spectral.errors import check_is
from lightning_spectral.functional.checks import as_magnitudes
from lightning_spectral.functional.sampling.inclusion import (
    ORDER,
    proportional_inclusion_probs,
    schatten_inclusion_probs,
    top_inclusion_probs,
)
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs
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


@dataclass(frozen=True)
class PriSM(ShardingStrategy):
    """Successive sampling with sizes :math:`s_i^k`, as in ``numpy.random.choice(replace=False)``, unscaled.

    Args:
        exponent: The power k > 0. ``None`` follows Korzhenkov & Louizos (2024): 4 for keep ratios up to 0.2, 2.5 above.
            PriSM's own experiments use one exponent for all clients.
        compensation: ``None`` for multipliers of one, as in PriSM; ``"wallenius"`` for 1/pi, which makes each client's
            estimator unbiased: "PriSM + Wallenius" of the 2024 paper.
        marginals: ``"exact"`` inclusion probabilities, or ``"manly"`` for Manly's approximation, which that paper used.

    Note:
        The exact inclusion probabilities are the marginals of this draw, so they belong to the strategy's
        :meth:`own_design`; another design keeps the marginals and only changes which terms are drawn together.

    Reference:
        Niu et al. (2022).

    Example:
        >>> s = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)
        >>> PriSM(exponent=1)(s, num_terms=2, cohort_size=10)[0]
        tensor([0.8333, 0.5833, 0.5833], dtype=torch.float64)
    """

    exponent: float | None = None
    compensation: Literal["wallenius"] | None = None
    marginals: Literal["exact", "manly"] = "exact"

    def __post_init__(self) -> None:
        check_fields(
            self,
            exponent=Number(above=0, optional=True),
            compensation=OneOf((None, "wallenius")),
            marginals=OneOf(("exact", "manly")),
        )

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        marginals = successive_inclusion_probs if self.marginals == "exact" else manly_inclusion_probs
        probs = marginals(self._log_sizes(singular_values, num_terms), num_terms)
        return probs, torch.ones_like(probs) if self.compensation is None else inverse_probs(probs)

    def own_design(self, singular_values: Tensor, num_terms: int) -> SuccessiveSampling:
        return SuccessiveSampling(self._log_sizes(singular_values, num_terms))

    def _log_sizes(self, singular_values: Tensor, num_terms: int) -> Tensor:
        values = as_magnitudes(singular_values, "singular_values")
        exponent = self.exponent
        if exponent is None:
            # r <= 0.2 is the same as n = ceil(r N) <= ceil(0.2 N), in integers; n / N may exceed 0.2: 13 / 64.
            exponent = 4.0 if num_terms <= -(-len(values) // 5) else 2.5
        return exponent * values.log()
