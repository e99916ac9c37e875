"""Strategies for the average over a cohort, whose clients' errors cancel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_spectral.arguments import OneOf, check_fields
from lightning_spectral.functional.figures.discrepancy import cohort_discrepancy
from lightning_spectral.functional.sampling.cohorts import (
    SLACK,
    effective_cohort_size,
    joint_multipliers,
    kish_size,
)
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, collective_multipliers
from lightning_spectral.sharding.base import ShardingStrategy

CohortPlan = Literal["group", "joint", "best"]


@dataclass(frozen=True)
class Collective(ShardingStrategy):
    r"""Probabilities and multipliers that minimise the error of the average of C independent clients.

    :math:`\pi_i = \operatorname{clip}((s_i/L - 1)/(C - 1), 0, 1)` and
    :math:`\omega_i = C / (1 + (C - 1)\pi_i)`, between top-n (C = 1) and :class:`Unbiased` (C to infinity).
    Small terms may never be drawn; multipliers stay below C.

    Args:
        cohort: How to treat a cohort of clients with different keep ratios or different weights in the average.

            - ``"group"``: each group of equal keep ratios separately, with its own number of clients, whatever their
              weights. The paper's recipe.
            - ``"joint"``: each group with the total number of clients, then the multipliers that are best for the
              average over all of them. Clients of different weights count as Kish's number of equal ones,
              :math:`1 / \sum_c a_c^2` in each group. Multipliers may exceed the number of clients, or be zero where
              other clients hold the term for certain.
            - ``"best"``: layer by layer, whichever has the least discrepancy: either of these two, or the paper's
              probabilities with the best multipliers.

    Note:
        A lower discrepancy does not imply a better model: it measures the sub-models before any client trains. This is
        why the paper's recipe is the default.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.2 and Algorithm 2 with the sign of line 30 corrected.

    Example:
        >>> Collective()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=3)
        (tensor([1.0000, 0.8333, 0.1667], dtype=torch.float64), tensor([1.0000, 1.1250, 2.2500],
        dtype=torch.float64))
    """

    cohort: CohortPlan = "group"

    def __post_init__(self) -> None:
        check_fields(self, cohort=OneOf(get_args(CohortPlan)))

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        probs = collective_inclusion_probs(singular_values.double(), num_terms, cohort_size)
        return probs, collective_multipliers(probs, cohort_size)

    def for_groups(
        self, singular_values: Tensor, num_terms: Sequence[int], weights: Sequence[Sequence[float]]
    ) -> list[tuple[Tensor, Tensor]]:
        apart = super().for_groups(singular_values, num_terms, weights)
        if self.cohort == "group":
            return apart
        if not any(map(any, weights)):  # no client has data: all count equally
            weights = [[1.0] * len(own) for own in weights]
        total = sum(kish_size(own) for own in weights if any(own))
        joint = _with_joint_multipliers([self(singular_values, n, total) for n in num_terms], weights)
        if self.cohort == "joint":
            return joint
        recipes = [apart, joint, _with_joint_multipliers(apart, weights)]
        return min(recipes, key=lambda groups: _discrepancy(singular_values, groups, weights))


def _with_joint_multipliers(
    groups: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Sequence[float]]
) -> list[tuple[Tensor, Tensor]]:
    probs = torch.stack([group for group, _ in groups])
    sizes, shares = torch.tensor([[kish_size(own), sum(own)] for own in weights], dtype=torch.float64).T
    return list(zip(probs, joint_multipliers(probs, sizes, shares), strict=True))


def _discrepancy(
    singular_values: Tensor, groups: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Sequence[float]]
) -> float:
    rows = [group for group, own in zip(groups, weights, strict=True) for _ in own]
    probs, multipliers = (torch.stack(column) for column in zip(*rows, strict=True))
    flat = torch.tensor([weight for own in weights for weight in own], dtype=torch.float64)
    return float(cohort_discrepancy(singular_values, probs, multipliers, flat / flat.sum()))


@dataclass(frozen=True)
class EffectiveCohort(ShardingStrategy):
    r"""`Collective` for the largest number of clients that keeps each sub-model close to the weight.

    `Collective` minimises the error of an average, in which clients' errors cancel. But each client trains its own
    sub-model, which may be far from the weight. Layer by layer, this strategy uses the largest effective number of
    clients for which the expected squared error of a single sub-model is at most :math:`1 + slack` times that of the n
    largest terms. With slack 0 it is :class:`TopN`, with infinite slack :class:`Collective`.

    Args:
        slack: By how much the squared error of a client's sub-model may exceed that of the best sub-model of n terms,
            as a share of the latter.

    Note:
        Any mixture of the client's and the cohort's error is the cohort's error for another number of clients, so no
        strategy can improve on one of the two without making the other worse: see
        `functional.sampling.effective_cohort`.

    Example:
        >>> s = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
        >>> EffectiveCohort(slack=0.5)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.8882, 0.1118], dtype=torch.float64)
    """

    slack: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, slack=SLACK)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        size = effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)
        return Collective()(singular_values, num_terms, size)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        return {"effective_cohort": effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)}
