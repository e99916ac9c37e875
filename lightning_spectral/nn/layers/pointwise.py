"""Convolutions with a kernel of size one, computed as a matrix applied at every position."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def pointwise(
    x: Tensor, matrix: Tensor, bias: Tensor | None, stride: tuple[int, ...], conv: Callable[..., Tensor]
) -> Tensor:
    """A convolution whose kernel has size one in each dimension, computed by matrix products where they are faster.

    Args:
        x: Shape ``(batch, columns, *positions)``, or the same without the batch.
        matrix: Shape ``(rows, columns)``.
        bias: Shape ``(rows,)``.
        stride: One number for each dimension of the positions.
        conv: The torch convolution with the same number of dimensions.

    Returns:
        Shape ``(batch, rows, *positions)``, the positions divided by the stride.

    Example:
        >>> x, matrix = torch.randn(2, 3, 9, 9), torch.randn(4, 3)
        >>> expected = torch.conv2d(x, matrix.view(4, 3, 1, 1), stride=2)
        >>> torch.allclose(pointwise(x, matrix, None, (2, 2), torch.conv2d), expected, atol=1e-5)
        True
    """
    ones = (1,) * len(stride)
    if x.device.type == "cpu" and x.is_contiguous() and x.dim() == len(stride) + 2:
        if stride != ones:  # do not read skipped positions: 1.2 to 1.6 times as fast
            kept: Any = (..., *(slice(None, None, step) for step in stride))
            x, stride = x[kept].contiguous(), ones
        if products_are_faster(matrix.numel(), math.prod(x.shape[2:])):
            weights, positions = matrix.expand(len(x), -1, -1), x.flatten(2)
            out = torch.bmm(weights, positions) if bias is None else torch.baddbmm(bias[:, None], weights, positions)
            return out.view(len(x), len(matrix), *x.shape[2:])
    return conv(x, matrix.view(*matrix.shape, *ones), bias, stride)


def products_are_faster(num_values: int, num_positions: int) -> bool:
    """Whether one matrix product for each example beats a convolution, for channels-first memory on a CPU.

    A convolution repacks channels-first memory, which a product reads as it is. But each product packs the matrix
    again, so the matrix must be small. Measured for 64 to 512 channels at 16 to 196 positions, products are mostly 1 to
    2.5 times as fast where this holds, and 0.6 to 1 times elsewhere.

    Args:
        num_values: Number of elements of the matrix.
        num_positions: Number of positions of one example.

    Example:
        >>> products_are_faster(num_values=64 * 7, num_positions=32 * 32)
        True
        >>> products_are_faster(num_values=512 * 205, num_positions=4 * 4)
        False
    """
    return num_values <= 1024 * max(32, num_positions)
