r"""Probabilities of a sum of independent, unequal Bernoulli variables, with and without each of them.

Conditional Poisson and successive sampling both rest on the number N of terms that a *Poisson* draw selects, each term
i independently with probability p_i. Its distribution comes from the characteristic function
:math:`\varphi(\theta) = \prod_j (1 - p_j + p_j e^{i\theta})`, and leaving term i out only divides by its own factor, so
all N leave-one-out results cost one complex matrix. Errors are absolute, about 1e-15: the discrete Fourier sum runs
over a window that holds all but 1e-18 of the counts, and is truncated where the characteristic function itself is below
1e-18. A few dozen nodes are enough for any number of terms.

Probabilities are float64 on the CPU, of shape ``(N,)`` or, where the ``...`` of a result say so, ``(..., N)`` with
separate rows; events are given by their smallest and their largest count.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Everything below e^-LOG_TAIL, about 1e-18, is left out of the Fourier sums.
LOG_TAIL = 41.5


class _FourierGrid(NamedTuple):
    lowest: int  # counts below this one, and those at or above lowest + period, have probability < 1e-18
    period: int  # odd, so that no node falls on theta = pi, where the factor of p = 1/2 is zero
    num_nodes: int  # nodes k >= 0 have theta = 2 pi k / period; conjugate symmetry gives the rest


def tail_spread(variance: float) -> float:
    """Distance from the mean beyond which, by Bernstein's inequality, a count has probability below 1e-18."""
    return LOG_TAIL / 3 + math.sqrt(LOG_TAIL**2 / 9 + 2 * variance * LOG_TAIL)


def _fourier_grid(probs: Tensor) -> _FourierGrid:
    """Nodes for the counts of all rows of ``probs``, shape ``(..., N)``."""
    means, variances = probs.sum(-1).aminmax(), (probs * (1 - probs)).sum(-1).aminmax()
    spread = tail_spread(float(variances.max))
    # Two more below because one or two terms may be left out.
    lowest = max(0, math.floor(float(means.min) - spread) - 2)
    highest = min(probs.shape[-1], math.ceil(float(means.max) + spread))
    period = (highest - lowest + 1) | 1
    # |phi(theta)| <= exp(-variance (1 - cos theta)) is below e^-LOG_TAIL beyond this angle.
    reach = math.acos(max(-1.0, 1 - LOG_TAIL / max(float(variances.min), 1e-300)))
    last = min(period // 2, math.ceil(reach * period / (2 * math.pi)))
    return _FourierGrid(lowest, period, last + 1)


def _factors(probs: Tensor, grid: _FourierGrid) -> Tensor:
    """Factors 1 - p + p e^(i theta), shape (..., T, N)."""
    return 1 + probs[..., None, :] * _steps(grid.period, grid.num_nodes)


# A fit evaluates the same few grids over and over, as do fits of layers of the same size. Never write to the results.
@lru_cache(maxsize=32)
def _steps(period: int, num_nodes: int) -> Tensor:
    """e^(i theta) - 1 at each node, shape (T, 1)."""
    angles = 2 * math.pi / period * torch.arange(num_nodes).double()
    return (torch.polar(torch.ones_like(angles), angles) - 1)[:, None]


@lru_cache(maxsize=32)
def _kernel(grid: _FourierGrid, first: int, last: int) -> Tensor:
    """Fourier kernel (T,) of the event first <= count <= last."""
    start, stop = max(first, grid.lowest), min(last + 1, grid.lowest + grid.period)
    counts = torch.arange(start, max(start, stop))
    # The phase is reduced modulo the period in integers, where it is exact.
    phase = 2 * math.pi / grid.period * ((torch.arange(grid.num_nodes)[:, None] * counts) % grid.period).double()
    kernel = torch.polar(torch.ones_like(phase), -phase).sum(1)
    kernel[1:] *= 2  # node 0 counts once, every other node also for its conjugate
    return kernel / grid.period


def count_probabilities(probs: Tensor, first: int, last: int) -> Tensor:
    """P(first <= N <= last) for the number N of successes of independent Bernoulli trials, shape ``(...)``."""
    grid = _fourier_grid(probs)
    whole = _kernel(grid, first, last) * _factors(probs, grid).prod(-1)
    return whole.sum(-1).real.clamp(0, 1)


def leave_one_out_probabilities(probs: Tensor, first: int, last: int) -> Tensor:
    """P(first <= N - (outcome of i) <= last) for every i, shape ``(..., N)``: the count without trial i."""
    return _leave_one_out(probs, (first, last)).squeeze(-2)


def leave_one_out_neighbours(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """P(N - (outcome of i) = count - 1) and P(N - (outcome of i) = count), for every i, at the cost of one."""
    below, equal = _leave_one_out(probs, (count - 1, count - 1), (count, count)).unbind(-2)
    return below, equal


def _leave_one_out(probs: Tensor, *events: tuple[int, int]) -> Tensor:
    """Probabilities of some events, each from the first to the last count, shape ``(..., events, N)``."""
    grid = _fourier_grid(probs)
    factors = _factors(probs, grid)
    whole = torch.stack([_kernel(grid, *event) for event in events]) * factors.prod(-1)[..., None, :]
    return (whole @ factors.reciprocal()).real.clamp(0, 1)


def leave_two_out_probabilities(probs: Tensor, first: int, last: int) -> Tensor:
    """P(first <= N - (outcomes of i and j) <= last) for every pair: one matrix product, safe for ties.

    The result is symmetric, shape ``(N, N)``; its diagonal, which would leave term i out twice, is meaningless.
    """
    grid = _fourier_grid(probs)
    factors = _factors(probs, grid)
    whole = _kernel(grid, first, last) * factors.prod(1)
    inverse = factors.reciprocal()
    weighted = whole[:, None] * inverse
    # The real part of the complex product as one real product of twice the length.
    left = torch.cat([weighted.real, -weighted.imag])
    pairs = left.T @ torch.cat([inverse.real, inverse.imag])
    return ((pairs + pairs.T) / 2).clamp(0, 1)  # exactly symmetric


def centred_logits(logits: Tensor, mean: int) -> Tensor:
    """Shift all logits by the constant that makes the expected count of successes a given integer.

    The law of the trials *given* their count does not change. But the count becomes likely, so that the probabilities
    above have a small relative error and rejection sampling is fast.
    """
    equal_odds = math.log(mean / (len(logits) - mean))
    low, high = equal_odds - float(logits.max()), equal_odds - float(logits.min())

    def moments(shift: float) -> tuple[Tensor, Tensor]:
        probs = torch.sigmoid(logits + shift)
        return probs, probs * (1 - probs)

    return logits + increasing_root(moments, min(max(0.0, low), high), low, high, mean)


def increasing_root(
    values_at: Callable[[float], tuple[Tensor, Tensor]], start: float, low: float, high: float, total: int
) -> float:
    """Where increasing values sum to a total: Newton's method on the values and slopes at a point, within a bracket."""
    point = start
    for _ in range(100):
        values, slopes = values_at(point)
        excess = float(values.sum()) - total
        newton = point - excess / max(float(slopes.sum()), 1e-300)
        if abs(excess) <= 1e-15 * total or newton == point:
            break
        low, high = (low, point) if excess > 0 else (point, high)
        point = newton if low < newton < high else (low + high) / 2
    return point
