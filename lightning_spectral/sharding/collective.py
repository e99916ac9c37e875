"""Collective: the average over the whole cohort has the least error."""

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.functional.inclusion import collective_inclusion_probs, collective_multipliers
from lightning_spectral.sharding.base import ShardingStrategy


@dataclass(frozen=True)
class Collective(ShardingStrategy):
    r"""Probabilities and multipliers that minimise the error of the average of C independent clients.

    :math:`\pi_i = \operatorname{clip}((s_i/L - 1)/(C - 1), 0, 1)` and
    :math:`\omega_i = C / (1 + (C - 1)\pi_i)`, between top-n (C = 1) and :class:`Unbiased` (C to infinity).
    Small terms may never be drawn; multipliers stay below C.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.2 and Algorithm 2 with the sign of line 30 mended.

    Example:
        >>> import torch
        >>> Collective()(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64), num_terms=2, cohort_size=3)
        (tensor([1.0000, 0.8333, 0.1667], dtype=torch.float64), tensor([1.0000, 1.1250, 2.2500],
        dtype=torch.float64))
    """

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """The optimum of Theorem 3.2.

        Args:
            singular_values: Shape ``(N,)``, any order.
            num_terms: Number n of terms that a client holds.
            cohort_size: Number of clients C whose terms are averaged, any real number >= 1.

        Returns:
            Inclusion probabilities and multipliers, both of shape ``(N,)``, float64.

        Raises:
            ValueError: If ``num_terms`` or ``cohort_size`` is out of range, or a value is negative, infinite
                or NaN.
        """
        probs = collective_inclusion_probs(singular_values.double(), num_terms, cohort_size)
        return probs, collective_multipliers(probs, cohort_size)
