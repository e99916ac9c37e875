"""The largest absolute values of named tensors, which decide whether and how they can be summed exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LARGEST = 2.0**40  # about 1.1e12: what the sums of `exact_sum` have room for with 2^13 clients


@torch.no_grad()
def largest_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest absolute value of each tensor, NaN if it holds one, 0 if it is empty; one read from the device for all.

    Example:
        >>> largest_magnitudes({"weight": torch.tensor([1.0, -3.0]), "steps": torch.tensor(7), "none": torch.zeros(0)})
        {'weight': 3.0, 'steps': 7.0, 'none': 0.0}
    """
    magnitudes = dict.fromkeys(tensors, 0.0)
    filled = [name for name, tensor in tensors.items() if tensor.numel()]
    if filled:
        # several times as fast on a CPU as the infinity norm of `torch._foreach_norm`, which is not vectorised there
        ends = [_exact(end) for name in filled for end in torch.aminmax(tensors[name])]
        found = torch.stack(ends).view(-1, 2).abs().amax(1)
        magnitudes.update(zip(filled, found.tolist(), strict=True))
    return magnitudes


def can_be_summed(magnitude: float) -> bool:
    """Whether values up to a magnitude are finite and small enough for an exact sum.

    Example:
        >>> [can_be_summed(magnitude) for magnitude in (1.0, LARGEST, 2 * LARGEST, float("nan"))]
        [True, True, False, False]
    """
    return magnitude <= LARGEST


def largest_within(bound: float, values: Callable[[], Tensor]) -> float:
    """Return a bound on magnitudes, or the computed largest magnitude if the bound cannot guarantee an exact sum.

    Example:
        >>> largest_within(2.0, lambda: torch.ones(1)), largest_within(1e15, lambda: torch.ones(1))
        (2.0, 1.0)
    """
    sure = can_be_summed(2 * bound)  # twice, for what rounding adds
    return bound if sure else largest_magnitudes({"values": values()})["values"]


def _exact(end: Tensor) -> Tensor:
    """The value in a type that can be stacked with any floating-point type without loss."""
    return end if end.is_floating_point() else end.double()
