"""Three measures of the effective rank of a weight."""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_magnitudes


def entropy_rank(singular_values: Tensor) -> float:
    r"""Exponential of the Shannon entropy of the spectrum, :math:`2^{-\sum p_i \log_2 p_i}` with :math:`p = s/\sum s`.

    Args:
        singular_values: Non-negative, shape ``(N,)``.

    Returns:
        A number in ``[1, N]``; 0 for a zero weight.

    Note:
        The formula printed by Niu et al. (2022) takes the logarithm of a negative number; this is what it must mean.
        Their code computes `participation_rank`.

    Example:
        >>> round(entropy_rank(torch.tensor([1.0, 1.0, 1.0, 0.0])), 6)
        3.0
    """
    shares = _shares(singular_values)
    return float(torch.special.entr(shares).sum().exp()) if shares.sum() > 0 else 0.0


def participation_rank(singular_values: Tensor) -> float:
    r"""Participation ratio :math:`1/\sum p_i^2` with :math:`p = s/\sum s`, the Renyi entropy of order two.

    Args:
        singular_values: Non-negative, shape ``(N,)``.

    Returns:
        A number in ``[1, N]``; 0 for a zero weight.

    Reference:
        The published code of Niu et al. (2022) computes this as the effective rank.

    Example:
        >>> participation_rank(torch.tensor([2.0, 1.0, 1.0]))
        2.6666666666666665
    """
    shares = _shares(singular_values)
    return float(1 / (shares**2).sum()) if shares.sum() > 0 else 0.0


def stable_rank(singular_values: Tensor) -> float:
    r"""Squared Frobenius norm over squared spectral norm, :math:`\sum s_i^2 / s_1^2`.

    Args:
        singular_values: Non-negative, shape ``(N,)``.

    Returns:
        A number in ``[1, N]``; 0 for a zero weight.

    Example:
        >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
        1.5
    """
    values = as_magnitudes(singular_values, "singular_values")
    largest = values.max()
    return float(((values / largest) ** 2).sum()) if largest > 0 else 0.0


def _shares(singular_values: Tensor) -> Tensor:
    values = as_magnitudes(singular_values, "singular_values")
    return values / values.sum().clamp_min(torch.finfo(torch.float64).tiny)
