r"""Manly's approximation of the inclusion probabilities of successive sampling, as used in the paper."""

import math

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.poisson_binomial import increasing_root
from lightning_spectral.functional.sampling.successive_sampling import arrived, for_competing


def manly_inclusion_probs(log_sizes: Tensor, num_terms: int) -> Tensor:
    r"""Probabilities :math:`\mu_i = 1 - e^{-w_i t}` with t such that they sum to n.

    Treats the time of the n-th arrival as fixed. This is the mean of Wallenius' distribution according to Manly (1974)
    and Fog (2008), and what BiasedUrn's ``meanMWNCHypergeo`` computes at its default precision.

    Args:
        log_sizes: Logarithms of the sizes w, shape ``(N,)``, with ``-inf`` and ``+inf`` as in
            :func:`~lightning_spectral.functional.successive_inclusion_probs`; adding a constant to all of them changes
            nothing.
        num_terms: Sample size n, ``1 <= n <= N``.

    Returns:
        Approximate inclusion probabilities, shape ``(N,)``, float64 on the device of ``log_sizes``, with sum n.

    Note:
        The result is up to 8 % off for 7 of 64 sizes :math:`i^{-4}` and far more for fewer and steeper ones, and for
        n = 1 it is not even proportional to size. The function is included to reproduce the paper;
        :func:`~lightning_spectral.functional.successive_inclusion_probs` is exact.

    Reference:
        Manly (1974), Biometrics 30, 281-294; Fog (2008); Korzhenkov & Louizos (2024), Appendix C.

    Example:
        >>> manly_inclusion_probs(torch.tensor([2.0, 1.0, 1.0]).log(), num_terms=2)
        tensor([0.8284, 0.5858, 0.5858], dtype=torch.float64)
    """
    return for_competing(log_sizes, num_terms, _manly)


def _manly(log_rates: Tensor, num_terms: int) -> Tensor:
    even = math.log(-math.log1p(-num_terms / len(log_rates)))  # log t if all sizes were one
    low, high = even - float(log_rates.max()), even - float(log_rates.min())

    def arrivals(log_time: float) -> tuple[Tensor, Tensor]:
        expected = torch.exp((log_rates + log_time).clamp_max(50.0))
        return arrived(log_rates, log_time), expected * torch.exp(-expected)

    return arrived(log_rates, increasing_root(arrivals, low, low, high, num_terms))
