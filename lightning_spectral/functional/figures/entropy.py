"""The entropy of a set of inclusion probabilities."""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs


def marginal_entropy(inclusion_probs: Tensor) -> float:
    r"""Measure how explorative a strategy is: 0 if the terms are always the same, 1 if all are equally likely.

    The mean entropy of the N Bernoulli variables "term i is in the shard", divided by its largest possible value, that
    of :math:`\pi_i = n / N`. Averaged over the sharded layers of a network, this is the paper's ANME.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n.

    Returns:
        The normalised entropy in ``[0, 1]``, dimensionless; 0 for n = N, where nothing is left to chance.

    Raises:
        ValueError: If the input is not a vector of probabilities with an integer sum.

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
