"""EffectiveCohort: a compromise between sub-models that are close to the weight and an average that is."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.arguments import check_fields
from lightning_spectral.functional.sampling.effective_cohort import SLACK, effective_cohort_size
from lightning_spectral.sharding.base import ShardingStrategy
from lightning_spectral.sharding.collective import Collective


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
        >>> import torch
        >>> s = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
        >>> EffectiveCohort(slack=0.5)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.8882, 0.1118], dtype=torch.float64)
    """

    slack: float = 0.05

    def __post_init__(self) -> None:
        check_fields(self, slack=SLACK)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """The optimum of `Collective` for the effective number of clients."""
        size = effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)
        return Collective()(singular_values, num_terms, size)

    def figures(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> Mapping[str, float]:
        """The effective number of clients that was chosen."""
        return {"effective_cohort": effective_cohort_size(singular_values, num_terms, cohort_size, self.slack)}
