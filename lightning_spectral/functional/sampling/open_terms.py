"""Split inclusion probabilities into certain, impossible and open terms: the first step of every fixed-size design."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.poisson_binomial import centred_logits

# A probability closer than this to 0 or 1 counts as 0 or 1: the last digits of 1 - pi are rounding errors there.
SNAP = 1e-13


class OpenTerms(NamedTuple):
    """The part of a design that is left to chance.

    Attributes:
        certain: Indices of the terms that are always drawn, shape ``(N_certain,)``.
        undecided: Indices of the open terms, shape ``(N_open,)``.
        probs: Inclusion probabilities of the open terms, shape ``(N_open,)``, float64, strictly between 0 and
            1, with sum ``num_terms`` to rounding.
        num_terms: Number of open terms to draw, 0 when nothing is open.
    """

    certain: Tensor
    undecided: Tensor
    probs: Tensor
    num_terms: int

    def samples(self, positions: Tensor) -> Tensor:
        """Turn samples of open terms into samples of all terms.

        Args:
            positions: Positions among the open terms, int64, shape ``(num_samples, num_terms)``.

        Returns:
            Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the device of
            ``positions``.
        """
        drawn = self.undecided.to(positions.device)[positions]
        always = self.certain.to(positions.device).expand(len(positions), -1)
        return torch.cat([always, drawn], dim=1).sort(dim=1).values


def open_masks(probs: Tensor, num_terms: int) -> tuple[Tensor, Tensor, int]:
    """Masks (N,) of the certain terms and of the open terms, and the number of open terms to draw."""
    certain = probs >= 1 - SNAP
    undecided = (probs > SNAP) & ~certain
    missing = num_terms - int(certain.sum())
    if missing == int(undecided.sum()):
        return certain | undecided, torch.zeros_like(certain), 0
    return certain, undecided & (missing > 0), missing


def open_terms(inclusion_probs: Tensor) -> OpenTerms:
    """Check the inclusion probabilities of a design and set the certain and the impossible terms aside.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Entries closer than
            1e-13 to 0 or 1 count as 0 or 1.

    Returns:
        The terms left to draw from. Rounding may leave the sum a little off n, which no draw of exactly n terms could
        reproduce; the difference is spread over the open terms.

    Raises:
        ValueError: If the input is not a vector of probabilities with an integer sum.

    Example:
        >>> open_terms(torch.tensor([1.0, 0.5, 0.0, 0.5])).undecided
        tensor([1, 3])
    """
    probs, num_terms = as_inclusion_probs(inclusion_probs)
    certain, undecided, missing = open_masks(probs, num_terms)
    left = probs[undecided]
    if missing > 0:
        left = torch.sigmoid(centred_logits(torch.logit(left), missing))
    return OpenTerms(certain.nonzero()[:, 0], undecided.nonzero()[:, 0], left, missing)
