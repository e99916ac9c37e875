"""Anderson acceleration for the two fits that have no closed form."""

from collections.abc import Callable

import torch
from torch import Tensor

Residual = Callable[[Tensor], tuple[Tensor, Tensor]]


def solve_fixed_point(
    residual: Residual,
    start: Tensor,
    weights: Tensor,
    *,
    tolerance: float,
    memory: int = 6,
    max_iterations: int = 60,
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
        memory: Number of previous steps that are mixed.
        max_iterations: Largest number of evaluations.

    Returns:
        The best x seen and its error.
    """
    x, best = start, start
    best_error = torch.full(start.shape[:-1], float("inf"), dtype=start.dtype)
    done, stalled = torch.zeros_like(best_error, dtype=torch.bool), torch.zeros_like(best_error)
    points: list[Tensor] = []
    steps: list[Tensor] = []
    for _ in range(max_iterations):
        step, error = residual(x)
        better = (error < best_error) & ~done
        best = torch.where(better[..., None], x, best)
        best_error = torch.where(better, error, best_error)
        stalled = torch.where(better, 0, stalled + 1)
        done = done | (best_error < tolerance) | (stalled > memory)
        if done.all():
            break
        step = step - (weights * step).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
        step = torch.where(done[..., None], 0, step)
        points, steps = [*points[-memory:], x], [*steps[-memory:], step]
        x = torch.where(done[..., None], x, x + step - _mixing_correction(points, steps, weights))
    return best, best_error


def _mixing_correction(points: list[Tensor], steps: list[Tensor], weights: Tensor) -> Tensor:
    if len(steps) == 1:
        return torch.zeros_like(weights)
    step_changes = torch.stack(steps, dim=-1).diff(dim=-1)
    point_changes = torch.stack(points, dim=-1).diff(dim=-1)
    scale = weights.sqrt()[..., None]
    mix: Tensor = torch.linalg.lstsq(scale * step_changes, scale * steps[-1][..., None], driver="gelsd").solution
    return ((point_changes + step_changes) @ mix).squeeze(-1)
