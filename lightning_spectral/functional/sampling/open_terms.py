r"""What all fixed-size designs rest on: their open terms, the law of a count, and a solver for their fits.

A term is certain, impossible, or open. Let N be the number of terms that a *Poisson* draw selects, each term i
independently with probability p_i. Its distribution comes from the characteristic function
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

from lightning_spectral.functional.checks import as_inclusion_probs, check_num_samples

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


def open_terms(probs: Tensor, num_terms: int | None = None) -> OpenTerms:
    """Set the certain and the impossible terms of a design aside; its inclusion probabilities are checked without n.

    Rounding may leave the sum a little off n, which no draw of exactly n terms could reproduce; the difference is
    spread over the open terms.
    """
    if num_terms is None:
        probs, num_terms = as_inclusion_probs(probs)
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


# Everything below e^-LOG_TAIL, about 1e-18, is left out of the Fourier sums.
LOG_TAIL = 41.5


class FourierGrid(NamedTuple):
    """Where the characteristic function is evaluated."""

    lowest: int  # counts below this one, and those at or above lowest + period, have probability < 1e-18
    period: int  # odd, so that no node falls on theta = pi, where the factor of p = 1/2 is zero
    num_nodes: int  # nodes k >= 0 have theta = 2 pi k / period; conjugate symmetry gives the rest


def _grid_and_factors(probs: Tensor) -> tuple[FourierGrid, Tensor]:
    """Nodes for the counts of all rows of ``probs``, and their factors 1 - p + p e^(i theta), shape (..., T, N)."""
    means, variances = probs.sum(-1).aminmax(), (probs * (1 - probs)).sum(-1).aminmax()
    # By Bernstein's inequality, a count farther from its mean has probability below 1e-18.
    spread = LOG_TAIL / 3 + math.sqrt(LOG_TAIL**2 / 9 + 2 * float(variances.max) * LOG_TAIL)
    # Two more below because one or two terms may be left out.
    lowest = max(0, math.floor(float(means.min) - spread) - 2)
    highest = min(probs.shape[-1], math.ceil(float(means.max) + spread))
    period = (highest - lowest + 1) | 1
    # |phi(theta)| <= exp(-variance (1 - cos theta)) is below e^-LOG_TAIL beyond this angle.
    reach = math.acos(max(-1.0, 1 - LOG_TAIL / max(float(variances.min), 1e-300)))
    last = min(period // 2, math.ceil(reach * period / (2 * math.pi)))
    return FourierGrid(lowest, period, last + 1), 1 + probs[..., None, :] * _steps(period, last + 1)


# A fit evaluates the same few grids over and over, as do fits of layers of the same size. Never write to the results.
@lru_cache(maxsize=32)
def _steps(period: int, num_nodes: int) -> Tensor:
    """e^(i theta) - 1 at each node, shape (T, 1)."""
    angles = 2 * math.pi / period * torch.arange(num_nodes).double()
    return (torch.polar(torch.ones_like(angles), angles) - 1)[:, None]


@lru_cache(maxsize=32)
def _kernel(grid: FourierGrid, first: int, last: int) -> Tensor:
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
    grid, factors = _grid_and_factors(probs)
    return (_kernel(grid, first, last) * factors.prod(-1)).sum(-1).real.clamp(0, 1)


def leave_one_out_probabilities(probs: Tensor, *events: tuple[int, int]) -> Tensor:
    """P(first <= N - (outcome of i) <= last) for every i and event (first, last), shape ``(..., events, N)``."""
    grid, factors = _grid_and_factors(probs)
    whole = torch.stack([_kernel(grid, *event) for event in events]) * factors.prod(-1)[..., None, :]
    return (whole @ factors.reciprocal()).real.clamp(0, 1)


def leave_two_out_probabilities(probs: Tensor, first: int, last: int) -> Tensor:
    """P(first <= N - (outcomes of i and j) <= last) for every pair: one matrix product, safe for ties.

    The result is symmetric, shape ``(N, N)``; its diagonal, which would leave term i out twice, is meaningless.
    """
    grid, factors = _grid_and_factors(probs)
    whole, inverse = _kernel(grid, first, last) * factors.prod(1), factors.reciprocal()
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


MIXED, MOST_EVALUATIONS = 6, 60  # previous steps that are mixed


def solve_fixed_point(
    residual: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor, weights: Tensor, *, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Find x with zero residual, up to a constant added to all of x, by Anderson mixing of plain steps.

    The plain iteration converges linearly and, where a design is nearly deterministic, oscillates. Mixing the last few
    steps by least squares cures both; about five to fifteen iterations suffice. Several problems of the same size, rows
    of shape ``(..., N)``, are solved together, each as if it were alone; one that has been solved is no longer updated.

    Args:
        residual: Maps x to the plain step, of the same shape, and the error of x in the caller's unit, shape ``(...)``.
            Neither changes if a constant is added to all N entries.
        start: First guess, float64.
        weights: Sensitivity of the answer to each entry of x, non-negative and not all zero. They weight the least
            squares: entries that hardly matter are poorly determined and would drown out the others.
        tolerance: Stop below this error.

    Returns:
        The best x seen and its error.
    """
    x = best = start
    best_error = torch.full(start.shape[:-1], float("inf"), dtype=start.dtype)
    done, stalled = torch.zeros_like(best_error, dtype=torch.bool), torch.zeros_like(best_error)
    points: list[Tensor] = []
    steps: list[Tensor] = []
    scale = weights.sqrt()[..., None]
    for _ in range(MOST_EVALUATIONS):
        step, error = residual(x)
        better = (error < best_error) & ~done
        best = torch.where(better[..., None], x, best)
        best_error = torch.where(better, error, best_error)
        stalled = torch.where(better, 0, stalled + 1)
        done = done | (best_error < tolerance) | (stalled > MIXED)
        if done.all():
            break
        step = step - (weights * step).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
        step = torch.where(done[..., None], 0, step)
        points, steps = [*points[-MIXED:], x], [*steps[-MIXED:], step]
        plain = x + step
        if len(steps) > 1:
            step_changes, point_changes = (torch.stack(kept, dim=-1).diff(dim=-1) for kept in (steps, points))
            mix = torch.linalg.lstsq(scale * step_changes, scale * step[..., None], driver="gelsd").solution
            plain = plain - ((point_changes + step_changes) @ mix).squeeze(-1)
        x = torch.where(done[..., None], x, plain)
    return best, best_error


def joint_of_all(among_open: Tensor, marginals: Tensor, certain: Tensor, index: Tensor) -> Tensor:
    """The matrix for all terms: a certain term is in every sample; impossible terms stay zero."""
    joint = torch.zeros(len(marginals), len(marginals), dtype=torch.float64)
    joint[index[:, None], index] = among_open
    joint[certain] = marginals
    joint[:, certain] = marginals[:, None]
    return joint.fill_diagonal_(0.0) + marginals.diag()
