r"""Conditional Poisson sampling term by term, with a fixed number of uniforms for each sample.

Walk through the terms; with r places left, term k gets one with probability

.. math:: q_{k,r} = p_k \, \frac{P(N_{k+1} = r - 1)}{P(N_k = r)},

where :math:`N_k` is the number of terms selected among k, k + 1, ... in the Poisson draw. The table of these counts is
filled backwards with sums of positive products, so every entry that matters keeps full precision. A Fourier transform
would not do: its absolute errors are large relative to the tails, by which the formula divides. Elementary symmetric
sums of odds, which are the same numbers without the factors 1 - p, overflow.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_spectral.functional.checks import check_num_samples
from lightning_spectral.functional.sampling.conditional_poisson import working_open_terms
from lightning_spectral.functional.sampling.open_terms import OpenTerms
from lightning_spectral.functional.sampling.poisson_binomial import tail_spread

Floats = NDArray[np.float64]


class SelectionTable(NamedTuple):
    """Probability that a term gets a place, by term and number of places left, for the band of numbers that matter.

    Attributes:
        parts: The open terms.
        probs: Shape ``(N_open, W)``: entry ``[k, r - lowest[k]]`` is the probability that open term k gets one
            of r places.
        lowest: Smallest number of places in the band of each term, int64, shape ``(N_open,)``. The probability of
            leaving the band is below 1e-15.
        num_total: Number N of terms.
    """

    parts: OpenTerms
    probs: Floats
    lowest: NDArray[np.int64]
    num_total: int


def selection_table(working_probs: Tensor, num_terms: int) -> SelectionTable:
    """Fill the table for one design; it takes about 15 MB for 2048 of 4096 terms.

    Args:
        working_probs: From :func:`~lightning_spectral.functional.fit_conditional_poisson`, shape ``(N,)``.
        num_terms: Sample size n, between the number of ones and the number of positive entries.

    Returns:
        The table; the inclusion probabilities of its draws are those of the design within 1e-12.

    Raises:
        ValueError: If a probability or ``num_terms`` is out of range.

    Example:
        >>> selection_table(torch.tensor([0.5, 0.5], dtype=torch.float64), 1).probs  # columns: 0 or 1 place left
        array([[0. , 0.5],
               [0. , 1. ]])
    """
    parts = working_open_terms(working_probs, num_terms)
    probs = parts.probs.numpy()
    if parts.num_terms == 0:
        return SelectionTable(parts, np.zeros((0, 1)), np.zeros(0, dtype=np.int64), len(working_probs))
    lowest, width = _band(probs, parts.num_terms)
    return SelectionTable(parts, _selection_probs(probs, lowest, width), lowest[:-1], len(working_probs))


def _band(probs: Floats, num_terms: int) -> tuple[NDArray[np.int64], int]:
    """Smallest number of places for each term, shape (N_open + 1,) with the end, and the width of the band."""
    mean = np.append(probs[::-1].cumsum()[::-1], 0.0)
    variance = np.append((probs * (1 - probs))[::-1].cumsum()[::-1], 0.0)
    # A number of places left is unlikely if it is unlikely for the terms ahead or for those already passed.
    spread = int(tail_spread(float(np.minimum(variance, variance[0] - variance).max()))) + 1
    lowest = np.maximum(0, np.floor(mean).astype(np.int64) - spread)
    return lowest, min(2 * spread + 2, num_terms + 1)


def _selection_probs(probs: Floats, lowest: NDArray[np.int64], width: int) -> Floats:
    size = len(probs)
    taken = np.empty((size, width))
    # Row k holds P(N_k = r) for r from lowest[k] - 1 on: a margin of one entry on either side stays zero.
    counts = np.zeros((size + 1, width + 2))
    counts[size, 1] = 1.0  # no terms, no places
    moves = -np.diff(lowest)  # each zero or one: a mean changes by less than one
    for k in range(size - 1, -1, -1):
        later, move = counts[k + 1], moves[k]
        taken[k] = probs[k] * later[move : move + width]
        counts[k, 1:-1] = taken[k] + (1 - probs[k]) * later[move + 1 : move + 1 + width]
    now = counts[:-1, 1:-1]
    # Numbers of places that underflow to probability zero never occur; 0 and 1 below are exact in any case.
    table = np.divide(taken, now, out=np.full_like(taken, 0.5), where=now > 0)
    places = lowest[:-1, None] + np.arange(width)
    table[places <= 0] = 0.0
    table[places >= size - np.arange(size)[:, None]] = 1.0
    return table


def draw_from_table(table: SelectionTable, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw exact independent samples from exactly N uniforms each: uniform i decides on term i.

    Args:
        table: From :func:`selection_table`.
        num_samples: Number of draws.
        generator: Source of randomness.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the generator's device.

    Raises:
        ValueError: If ``num_samples`` is below one.

    Example:
        >>> table = selection_table(torch.tensor([1.0, 0.5, 0.5, 0.0]), num_terms=3)
        >>> draw_from_table(table, 1, torch.Generator())
        tensor([[0, 1, 2]])
    """
    check_num_samples(num_samples)
    device = generator.device
    uniforms = torch.rand(num_samples, table.num_total, generator=generator, device=device, dtype=torch.float64)
    rows = _walk(table, uniforms[:, table.parts.undecided.to(device)].T.cpu().numpy())
    positions = torch.from_numpy(rows).T.nonzero()[:, 1].view(num_samples, table.parts.num_terms)
    return table.parts.samples(positions.to(device))


def _walk(table: SelectionTable, uniforms: Floats) -> NDArray[np.bool_]:
    """Mask of the terms that get a place, shape (N_open, num_samples)."""
    left = np.full(uniforms.shape[1], table.parts.num_terms)
    taken = np.empty(uniforms.shape, dtype=np.bool_)
    highest = table.probs.shape[1] - 1
    for k, (probs, lowest) in enumerate(zip(table.probs, table.lowest, strict=True)):
        column = (left - lowest).clip(0, highest)
        taken[k] = uniforms[k] < probs[column]
        left -= taken[k]
    return taken
