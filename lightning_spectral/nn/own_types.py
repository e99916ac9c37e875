"""How tensors with a type of their own move with their module, whatever a Trainer's precision."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Move = Callable[[Tensor], Tensor]


def keeping_type(move: Move) -> Move:
    """What ``nn.Module._apply`` calls for a tensor that moves but keeps its type.

    Example:
        >>> keeping_type(torch.Tensor.half)(torch.zeros(2)).dtype
        torch.float32
    """
    return _with_type(move, lambda before, after: before)


def keeping_float32(move: Move) -> Move:
    """The same for a tensor that follows its module's type, but keeps at least single precision.

    Example:
        >>> [keeping_float32(move)(torch.zeros(2)).dtype for move in (torch.Tensor.half, torch.Tensor.double)]
        [torch.float32, torch.float64]
    """
    return _with_type(move, lambda before, after: at_least_float32(after) if after.is_floating_point else after)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """A floating-point type, or float32 if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def _with_type(move: Move, choose: Callable[[torch.dtype, torch.dtype], torch.dtype]) -> Move:
    def moved(tensor: Tensor) -> Tensor:
        there = move(tensor)
        dtype = choose(tensor.dtype, there.dtype)
        return there if there.dtype == dtype else tensor.to(there.device, dtype)  # not through the narrower type

    return moved
