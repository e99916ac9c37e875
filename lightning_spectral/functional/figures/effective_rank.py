"""Three measures of the effective rank of a weight, and one of how evenly its terms are drawn."""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs, as_magnitudes


def entropy_rank(singular_values: Tensor) -> float:
    r"""Exponential of the Shannon entropy of the spectrum, :math:`2^{-\sum p_i \log_2 p_i}` with :math:`p = s/\sum s`.

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

    A number in ``[1, N]``; 0 for a zero weight. The published code of Niu et al. (2022) computes this as the effective
    rank.

    Example:
        >>> participation_rank(torch.tensor([2.0, 1.0, 1.0]))
        2.6666666666666665
    """
    shares = _shares(singular_values)
    return float(1 / (shares**2).sum()) if shares.sum() > 0 else 0.0


def stable_rank(singular_values: Tensor) -> float:
    r"""Squared Frobenius norm over squared spectral norm, :math:`\sum s_i^2 / s_1^2`: in ``[1, N]``, or 0 for zeros.

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


def marginal_entropy(inclusion_probs: Tensor) -> float:
    r"""Measure how explorative a strategy is: 0 if the terms are always the same, 1 if all are equally likely.

    The mean entropy of the N Bernoulli variables "term i is in the shard", divided by its largest possible value, that
    of :math:`\pi_i = n / N`; 0 for n = N, where nothing is left to chance. Averaged over the sharded layers of a
    network, this is the paper's ANME. The probabilities, shape ``(N,)``, must sum to an integer n within 1e-6 n.

    Reference:
        Korzhenkov & Louizos (2024), Section 4, "average normalized marginal entropy".

    Example:
        >>> marginal_entropy(torch.tensor([1.0, 0.5, 0.5]))
        0.72598...
    """
    probs, num_terms = as_inclusion_probs(inclusion_probs)
    if num_terms == len(probs):
        return 0.0
    even = torch.full_like(probs, num_terms / len(probs))
    return float(_bernoulli_entropy(probs) / _bernoulli_entropy(even))


def _bernoulli_entropy(probs: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropies.sum()
