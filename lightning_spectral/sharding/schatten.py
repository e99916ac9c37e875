"""Schatten: unbiased, with the least bound on the error in a Schatten norm."""

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.arguments import check_fields
from lightning_spectral.functional.sampling.schatten import ORDER, schatten_inclusion_probs
from lightning_spectral.sharding.base import ShardingStrategy
from lightning_spectral.sharding.unbiased import inverse_probs


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
        >>> import torch
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> Schatten(p=4)(s, num_terms=2, cohort_size=10)[0]
        tensor([1.0000, 0.4541, 0.2730, 0.2730], dtype=torch.float64)
    """

    p: float = 4.0

    def __post_init__(self) -> None:
        check_fields(self, p=ORDER)

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        """The optimum of Eq. (10), and its inverses."""
        probs = schatten_inclusion_probs(singular_values.double(), num_terms, self.p)
        return probs, inverse_probs(probs)
