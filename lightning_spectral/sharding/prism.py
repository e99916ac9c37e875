"""PriSM: terms drawn one by one in proportion to a power of their singular value."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, OneOf, check_fields
from lightning_spectral.designs import SuccessiveSampling
from lightning_spectral.functional.checks import as_magnitudes
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs
from lightning_spectral.sharding.base import ShardingStrategy
from lightning_spectral.sharding.one_client import inverse_probs


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
