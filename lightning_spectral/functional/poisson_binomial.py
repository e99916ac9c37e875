r"""Probabilities of a sum of independent, unequal Bernoulli variables, with and without each of them.

Both fixed-size designs of this package rest on the number N of terms that a *Poisson* draw selects, each term
i on its own with probability p_i. Its distribution comes from the characteristic function
:math:`\varphi(\theta) = \prod_j (1 - p_j + p_j e^{i\theta})`, and leaving term i out only divides by its own
factor, so all N leave-one-out answers cost one complex matrix. Errors are absolute, about 1e-15: a discrete
Fourier sum over a window that holds all but 1e-18 of the counts, cut where the characteristic function itself
is below 1e-18. The number of nodes is a few dozen whatever the number of terms.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Everything below e^-LOG_TAIL, about 1e-18, is left out of the Fourier sums.
LOG_TAIL = 41.5


class _FourierGrid(NamedTuple):
    lowest: int  # counts below this one, and those at or above lowest + period, have probability < 1e-18
    period: int  # odd, so that no node falls on theta = pi, where the factor of p = 1/2 is zero
    nodes: Tensor  # node numbers k >= 0 with theta = 2 pi k / period; conjugate symmetry gives the rest


def _fourier_grid(probs: Tensor) -> _FourierGrid:
    mean, variance = float(probs.sum()), float((probs * (1 - probs)).sum())
    # Bernstein's inequality for both tails; one more below because a term may be left out.
    spread = LOG_TAIL / 3 + math.sqrt(LOG_TAIL**2 / 9 + 2 * variance * LOG_TAIL)
    lowest = max(0, math.floor(mean - spread) - 1)
    highest = min(len(probs), math.ceil(mean + spread))
    period = (highest - lowest + 1) | 1
    index = torch.arange(period // 2 + 1)
    # |phi(theta)| <= exp(-variance (1 - cos theta))
    kept = variance * (1 - torch.cos(2 * math.pi / period * index)) <= LOG_TAIL
    return _FourierGrid(lowest, period, index[kept])


def _factors_and_kernel(probs: Tensor, first: int, last: int) -> tuple[Tensor, Tensor] | None:
    """Factors 1 - p + p e^(i theta), shape (T, N), and the Fourier kernel of first <= count <= last."""
    grid = _fourier_grid(probs)
    first, last = max(first, grid.lowest), min(last, grid.lowest + grid.period - 1)
    if first > last:
        return None
    theta = 2 * math.pi / grid.period
    turn = torch.polar(torch.ones(len(grid.nodes), dtype=torch.float64), theta * grid.nodes.double())
    counts = torch.arange(first, last + 1)
    # The phase is reduced modulo the period in integers, where it is exact.
    phase = theta * ((grid.nodes[:, None] * counts) % grid.period).double()
    kernel = torch.polar(torch.ones_like(phase), -phase).sum(1) * torch.where(grid.nodes == 0, 1.0, 2.0)
    return 1 + probs * (turn[:, None] - 1), kernel / grid.period


def count_probability(probs: Tensor, first: int, last: int) -> float:
    """P(first <= N <= last) for the number N of successes of independent Bernoulli trials.

    Args:
        probs: Success probabilities, shape ``(N,)``, float64 on the CPU, each in ``[0, 1]``.
        first: Smallest count of the event.
        last: Largest count of the event, included.

    Returns:
        The probability, with an absolute error of about 1e-15.

    Example:
        >>> round(count_probability(torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64), 1, 2), 12)
        0.75
    """
    parts = _factors_and_kernel(probs, first, last)
    if parts is None:
        return 0.0
    factors, kernel = parts
    return float((kernel * factors.prod(1)).sum().real.clamp(0, 1))


def leave_one_out_probabilities(probs: Tensor, first: int, last: int) -> Tensor:
    """P(first <= N - (outcome of i) <= last) for every i: the count without trial i.

    Args:
        probs: Success probabilities, shape ``(N,)``, float64 on the CPU, each in ``[0, 1]``.
        first: Smallest count of the event.
        last: Largest count of the event, included.

    Returns:
        Probabilities, shape ``(N,)``, with an absolute error of about 1e-15.

    Example:
        >>> leave_one_out_probabilities(torch.tensor([0.5, 0.25], dtype=torch.float64), 0, 0)
        tensor([0.7500, 0.5000], dtype=torch.float64)
    """
    parts = _factors_and_kernel(probs, first, last)
    if parts is None:
        return torch.zeros_like(probs)
    factors, kernel = parts
    return ((kernel * factors.prod(1)) @ factors.reciprocal()).real.clamp(0, 1)


def centred_logits(logits: Tensor, mean: int) -> Tensor:
    """Add to all logits the constant that makes the expected count of successes a given whole number.

    The law of the trials *given* their count does not change. What changes is that the count is likely, so
    that the probabilities above are accurate relative to it and rejection sampling is quick.

    Args:
        logits: log(p / (1 - p)) of each trial, finite, shape ``(N,)``, float64 on the CPU.
        mean: The expected count, ``0 < mean < N``.

    Returns:
        Shifted logits, shape ``(N,)``.

    Example:
        >>> centred_logits(torch.tensor([7.0, 7.0], dtype=torch.float64), 1)
        tensor([0., 0.], dtype=torch.float64)
    """
    equal_odds = math.log(mean / (len(logits) - mean))
    low, high = equal_odds - float(logits.max()), equal_odds - float(logits.min())
    shift = min(max(0.0, low), high)
    for _ in range(100):
        probs = torch.sigmoid(logits + shift)
        excess = float(probs.sum()) - mean
        newton = shift - excess / max(float((probs * (1 - probs)).sum()), 1e-300)
        if abs(excess) <= 1e-15 * mean or newton == shift:
            break
        low, high = (low, shift) if excess > 0 else (shift, high)
        shift = newton if low < newton < high else (low + high) / 2
    return logits + shift
