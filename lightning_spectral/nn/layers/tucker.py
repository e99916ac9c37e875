"""Convolutions held as Tucker-2 factors: fewer input channels, a small kernel between them, more output channels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.conv import padded, pointwise
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import WeightBlock, row_blocks

PARTS = ("down", "core", "up")
CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


@cache
def tucker_ranks(shape: tuple[int, ...], num_terms: int) -> tuple[int, int]:
    """Numbers of inner input and output channels for at most as many values as n singular terms of the matrix have.

    They are the largest with about equal shares of the input and output channels, and do not fall as n grows.

    Args:
        shape: That of the weight, ``(c_out, c_in, *kernel)``.
        num_terms: Number n of terms.

    Example:
        >>> tucker_ranks((64, 32, 3, 3), num_terms=7)
        (8, 16)
        >>> tucker_ranks((64, 32, 3, 3), num_terms=64)
        (32, 64)
    """
    c_out, c_in, positions = shape[0], shape[1], math.prod(shape[2:])
    if num_terms >= min(c_out, c_in * positions):
        return c_in, c_out
    budget = num_terms * (c_in * positions + c_out)
    pairs = [(max(1, round(b * c_in / c_out)), b) for b in range(1, c_out + 1)]
    fitting = [(a, b) for a, b in pairs if a * c_in + a * b * positions + b * c_out <= budget]
    return max(fitting, default=(1, 1))


def compose(down: Tensor, core: Tensor, up: Tensor) -> Tensor:
    """The weight of three convolutions in a row, shape ``(c_out, c_in, *kernel)``.

    Args:
        down: Shape ``(a, c_in)``.
        core: Shape ``(b, a, *kernel)``.
        up: Shape ``(c_out, b)``.
    """
    return torch.einsum("ob,ba...,ai->oi...", up, core, down)


def tucker_factors(weight: Tensor, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
    r"""The factors ``down``, ``core`` and ``up`` of a weight, by its truncated higher-order SVD, of the weight's norm.

    Rows of ``down`` and columns of ``up`` are the leading left singular vectors of the unfoldings by input and output
    channels, so leading parts of all factors are those for fewer channels, up to the norm. What truncation takes from
    the norm of the core is given back to it by one factor, as the outputs of a layer should keep their size.

    Args:
        weight: Shape ``(c_out, c_in, *kernel)``; it is decomposed in float64.
        a: Number of inner input channels, at most ``c_in``.
        b: Number of inner output channels, at most ``c_out``.

    Returns:
        Tensors of the shapes ``(a, c_in)``, ``(b, a, *kernel)`` and ``(c_out, b)``, of the weight's type.

    Reference:
        Kim et al. (2016), Tucker-2; De Lathauwer et al. (2000), the higher-order SVD.

    Example:
        >>> weight = torch.randn(8, 6, 3, 3)
        >>> torch.allclose(compose(*tucker_factors(weight, 6, 8)), weight, atol=1e-5)
        True
    """
    whole = weight.detach().double()
    up = torch.linalg.svd(whole.flatten(1), full_matrices=False).U[:, :b]
    down = torch.linalg.svd(whole.transpose(0, 1).flatten(1), full_matrices=False).U[:, :a].T
    core = torch.einsum("ob,oi...,ai->ba...", up, whole, down)
    core *= whole.norm() / core.norm().clamp(min=torch.finfo(core.dtype).tiny)
    return down.to(weight), core.to(weight), up.to(weight)


class TuckerConv(ShardedLayer, nn.Module):
    """A ``1 x 1`` convolution to a channels, one with the kernel to b channels, and a ``1 x 1`` one with the bias.

    Create an instance from a dense convolution of one to three dimensions and one group, with ``like`` or
    ``from_dense``.

    Attributes:
        down: Parameter of shape ``(a, c_in)``.
        core: Parameter of shape ``(b, a, *kernel)``; it has the stride, padding and dilation of the dense layer.
        up: Parameter of shape ``(c_out, b)``.

    Example:
        >>> dense, x = nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.randn(1, 3, 9, 9)
        >>> torch.allclose(TuckerConv.from_dense(dense, num_terms=8)(x), dense(x), atol=1e-5)
        True
    """

    bias: nn.Parameter | None

    def __init__(self, dense: Any, num_terms: tuple[int, ...]) -> None:
        super().__init__()
        weight, (n,) = dense.weight, num_terms
        self.in_channels, self.out_channels, self.groups = dense.in_channels, dense.out_channels, 1
        self.kernel_size, self.stride, self.padding = dense.kernel_size, dense.stride, dense.padding
        self.dilation, self.padding_mode = dense.dilation, dense.padding_mode
        a, b = tucker_ranks(tuple(weight.shape), n)
        self.down = nn.Parameter(weight.new_zeros(a, self.in_channels))
        self.core = nn.Parameter(weight.new_zeros(b, a, *self.kernel_size))
        self.up = nn.Parameter(weight.new_zeros(self.out_channels, b))
        self.register_parameter("bias", None if dense.bias is None else nn.Parameter(torch.zeros_like(dense.bias)))

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        """The matrix whose number of terms says how large the factors may be."""
        return row_blocks("weight", dense.weight, [""])

    @classmethod
    @torch.no_grad()
    def from_dense(cls, dense: Any, num_terms: NumTerms) -> TuckerConv:
        layer = cls(dense, counts(num_terms))
        for own, factor in zip(
            (layer.down, layer.core, layer.up), tucker_factors(dense.weight, *layer.ranks), strict=True
        ):
            own.copy_(factor)
        if layer.bias is not None:
            layer.bias.copy_(dense.bias)
        return layer

    @property
    def ranks(self) -> tuple[int, int]:
        """Numbers a and b of inner channels."""
        return len(self.down), len(self.core)

    def forward(self, input: Tensor) -> Tensor:
        conv, ones = CONVOLUTIONS[len(self.kernel_size) - 1], (1,) * len(self.kernel_size)
        hidden, padding = padded(self, pointwise(input, self.down, None, ones, conv))
        hidden = conv(hidden, self.core, None, self.stride, padding, self.dilation)
        return pointwise(hidden, self.up, self.bias, ones, conv)

    def effective_weights(self, dense: Any) -> dict[str, Tensor]:
        return {"weight": compose(self.down, self.core, self.up)}

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, for modules that read it; differentiable."""
        return self.computed("weight", lambda: compose(self.down, self.core, self.up))

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, ranks={self.ranks}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )
