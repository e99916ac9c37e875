"""Split inclusion probabilities into certain, impossible and open terms: the first step of every fixed-size design."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs, check_num_samples
from lightning_spectral.functional.sampling.poisson_binomial import centred_logits

# A probability closer than this to 0 or 1 counts as 0 or 1: the last digits of 1 - pi are rounding errors there.
SNAP = 1e-13
# Largest number of values held at once by a draw: 8 MiB of float64.
CHUNK = 2**20


class OpenTerms(NamedTuple):
    """The part of a design that is left to chance."""

    certain: Tensor  # indices of the terms that are always drawn, shape (N_certain,)
    undecided: Tensor  # indices of the open terms, shape (N_open,)
    probs: Tensor  # of the open terms, float64, strictly between 0 and 1, with sum `num_terms` to rounding
    num_terms: int  # open terms to draw, 0 when nothing is open

    def samples(self, positions: Tensor) -> Tensor:
        """Turn positions among the open terms, shape ``(num_samples, num_terms)``, into sorted term indices."""
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
    """Check the inclusion probabilities of a design, and set the certain and the impossible terms aside.

    Rounding may leave the sum a little off n, which no draw of exactly n terms could reproduce; the difference is
    spread over the open terms.
    """
    return parted(*as_inclusion_probs(inclusion_probs))


def parted(probs: Tensor, num_terms: int) -> OpenTerms:
    """The parts of a design, with the probabilities of its open terms scaled to sum to the number left to draw."""
    certain, undecided, missing = open_masks(probs, num_terms)
    left = probs[undecided]
    if missing > 0:
        left = torch.sigmoid(centred_logits(torch.logit(left), missing))
    return OpenTerms(certain.nonzero()[:, 0], undecided.nonzero()[:, 0], left, missing)


def in_chunks(draw: Callable[[int], Tensor], num_samples: int, width: int) -> Tensor:
    """Rows from ``draw(number of rows)``, as many at a time as memory allows for this many values in each."""
    check_num_samples(num_samples)
    rows = max(1, CHUNK // max(1, width))
    return torch.cat([draw(min(rows, num_samples - done)) for done in range(0, num_samples, rows)])
