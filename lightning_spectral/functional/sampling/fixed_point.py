"""Anderson acceleration for the two fits that have no closed form."""

from collections.abc import Callable

import torch
from torch import Tensor

Residual = Callable[[Tensor], tuple[Tensor, float]]


def solve_fixed_point(
    residual: Residual,
    start: Tensor,
    weights: Tensor,
    *,
    tolerance: float,
    memory: int = 6,
    max_iterations: int = 60,
) -> tuple[Tensor, float]:
    """Find x with zero residual, up to a constant added to all of x, by Anderson mixing of plain steps.

    The plain iteration converges linearly and, where a design is nearly deterministic, oscillates. Mixing the last few
    steps by least squares cures both; about five to fifteen iterations suffice.

    Args:
        residual: Maps x of shape ``(N,)`` to the plain step, shape ``(N,)``, and the error of x in the user's
            unit. Both ignore a constant added to x.
        start: First guess, shape ``(N,)``, float64.
        weights: Sensitivity of the answer to each entry of x, shape ``(N,)``, positive. The least squares are
            weighted by it: entries that hardly matter are poorly determined and would drown the others.
        tolerance: Stop below this error.
        memory: Number of previous steps that are mixed.
        max_iterations: Largest number of evaluations.

    Returns:
        The best x seen, shape ``(N,)``, and its error.

    Example:
        >>> goal = torch.tensor([1.0, -1.0], dtype=torch.float64)
        >>> def residual(x):
        ...     return (goal - x) / 2, float((goal - x).abs().max())
        >>> x, error = solve_fixed_point(residual, 0 * goal, torch.ones_like(goal), tolerance=1e-12)
        >>> x, error < 1e-12
        (tensor([ 1.0000, -1.0000], dtype=torch.float64), True)
    """
    x, best, best_error, stalled = start, start, float("inf"), 0
    points: list[Tensor] = []
    steps: list[Tensor] = []
    for _ in range(max_iterations):
        step, error = residual(x)
        stalled = 0 if error < best_error else stalled + 1
        if error < best_error:
            best, best_error = x, error
        if best_error < tolerance or stalled > memory:
            break
        step = step - (weights * step).sum() / weights.sum()
        points, steps = [*points[-memory:], x], [*steps[-memory:], step]
        x = x + step - _mixing_correction(points, steps, weights)
    return best, best_error


def _mixing_correction(points: list[Tensor], steps: list[Tensor], weights: Tensor) -> Tensor:
    if len(steps) == 1:
        return torch.zeros_like(weights)
    step_changes = torch.stack(steps).diff(dim=0).T
    point_changes = torch.stack(points).diff(dim=0).T
    scale = weights.sqrt()[:, None]
    mix: Tensor = torch.linalg.lstsq(scale * step_changes, scale * steps[-1][:, None], driver="gelsd").solution
    return ((point_changes + step_changes) @ mix).squeeze(1)
