r"""Designs with few possible samples, in exact integer arithmetic.

A design whose samples and their probabilities can be listed needs no fit and no rejection: draw a number in
[0, 1) and look up the sample. Here probabilities are whole multiples of :math:`2^{-50}`, about 1e-15, so that
sums, differences and comparisons are exact, and so are sample sizes and inclusion probabilities in any order of
operations.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.functional.checks import check_num_samples
from lightning_spectral.functional.sampling.open_terms import OpenTerms

# Probability one in units; 2^50 * n fits into 64 bits for n < 8192.
ONE = 2**50


class Support(NamedTuple):
    """All samples that a design can draw.

    Attributes:
        samples: Term indices, sorted in each row, int64, shape ``(M, n)``.
        units: Probability of each sample in units of 2^-50, positive, int64, shape ``(M,)``, with sum 2^50.
    """

    samples: Tensor
    units: Tensor


def whole_units(parts: OpenTerms) -> Tensor:
    """Inclusion probabilities of the open terms in units of 2^-50, with the exact sum.

    Args:
        parts: The open terms.

    Returns:
        Whole numbers strictly between 0 and 2^50, int64, shape ``(N_open,)``, with sum ``2^50 num_terms``.

    Raises:
        ValueError: If more than 8191 terms are to be drawn: the sum would leave 64 bits.

    Example:
        >>> from lightning_spectral.functional.sampling.open_terms import open_terms
        >>> whole_units(open_terms(torch.tensor([0.5, 0.25, 0.25]))) / ONE
        tensor([0.5000, 0.2500, 0.2500])
    """
    if parts.num_terms * ONE >= 2**63:
        raise ValueError(f"This design draws at most 8191 open terms, got {parts.num_terms}; use ConditionalPoisson().")
    units = (parts.probs * ONE).round().long()
    # Rounding left the sum a few units off. Terms with the largest variance take one each, as often as needed.
    excess = int(units.sum()) - parts.num_terms * ONE
    by_variance = (parts.probs - 0.5).abs().argsort()
    count = max(1, len(units))
    shares = torch.full_like(units, abs(excess) // count)
    shares[by_variance[: abs(excess) % count]] += 1
    return units - shares if excess > 0 else units + shares


def draw_from_support(support: Support, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw independent samples from a list of possible ones.

    Args:
        support: The list of samples.
        num_samples: Number of draws.
        generator: Source of randomness.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the generator's device.

    Raises:
        ValueError: If ``num_samples`` is below one.

    Example:
        >>> only = Support(torch.tensor([[0, 2]]), torch.tensor([ONE]))
        >>> draw_from_support(only, 2, torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """
    check_num_samples(num_samples)
    device = generator.device
    point = torch.randint(ONE, (num_samples,), generator=generator, device=device)
    chosen = torch.searchsorted(support.units.to(device).cumsum(0), point, right=True)
    return support.samples.to(device)[chosen]


def support_joint_probs(support: Support, num_total: int) -> Tensor:
    r"""Joint inclusion probabilities :math:`P(i, j \in I)`, a sum over the possible samples.

    Args:
        support: The list of samples.
        num_total: Number N of terms.

    Returns:
        Shape ``(N, N)``, float64, symmetric, with the inclusion probabilities on the diagonal.

    Example:
        >>> halves = Support(torch.tensor([[0, 1], [0, 2]]), torch.tensor([ONE // 2, ONE // 2]))
        >>> support_joint_probs(halves, 3)[0]
        tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    drawn = torch.zeros(len(support.samples), num_total, dtype=torch.float64).scatter_(1, support.samples, 1.0)
    # Multiples of 2^-50 up to one: these sums are exact in float64.
    return drawn.T @ (drawn * (support.units.double() / ONE)[:, None])
