"""Convolutions held as n singular terms, whole, by group, or as terms of their spatial matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.arguments import OneOf, Rule, Whole
from lightning_spectral.nn.layers.leading_channels import leading_channels
from lightning_spectral.nn.layers.sharded import SIZE, NumTerms, ShardedLayer, SpectralShardedLayer, counts
from lightning_spectral.nn.layers.terms import (
    SingularTerms,
    WeightBlock,
    as_rows,
    from_rows,
    row_blocks,
)

PADDING, PADDING_MODE = OneOf(("valid", "same")), OneOf(("zeros", "reflect", "replicate", "circular"))
ConvT = TypeVar("ConvT", bound="SpectralShardedConv")


class SpectralShardedConv(SpectralShardedLayer):
    """A convolution with n output channels, followed by a ``1 x 1`` convolution with the bias.

    The first has the kernel, the stride, the padding and the dilation of the dense layer. If the two would take more
    multiplications than rebuilding and applying the weight, the weight is rebuilt once per pass instead.

    Args:
        num_terms: Number n of singular terms held, ``1 <= n <= min(out_channels, in_channels * kernel)``.
        kernel_size: One number for each dimension, as are stride, padding and dilation.
        padding: Numbers, or ``"same"`` / ``"valid"``.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.

    Reference:
        Niu et al. (2022), section 3.2.1; Korzhenkov & Louizos (2024), section 4.1.
    """

    conv: ClassVar[Callable[..., Tensor]]
    channel_dim: ClassVar[int]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, ...],
        num_terms: int,
        stride: tuple[int, ...] | None = None,
        padding: str | tuple[int, ...] = "valid",
        dilation: tuple[int, ...] | None = None,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_channels, out_channels = SIZE("in_channels", in_channels), SIZE("out_channels", out_channels)
        num_dims = -type(self).channel_dim - 1
        kernel_size = _per_dimension("kernel_size", kernel_size, num_dims, SIZE)
        ones = (1,) * num_dims
        super().__init__((out_channels, in_channels, *kernel_size), num_terms, bias, device, dtype)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = ones if stride is None else _per_dimension("stride", stride, num_dims, SIZE)
        self.padding: str | tuple[int, ...] = (
            PADDING("padding", padding)
            if isinstance(padding, str)
            else _per_dimension("padding", padding, num_dims, Whole(at_least=0))
        )
        self.dilation = ones if dilation is None else _per_dimension("dilation", dilation, num_dims, SIZE)
        self.groups = 1
        self.padding_mode = PADDING_MODE("padding_mode", padding_mode)

    @classmethod
    def like(cls: type[ConvT], dense: Any, num_terms: NumTerms) -> ConvT:
        (n,), weight = counts(num_terms), dense.weight
        if dense.groups != 1:
            raise ValueError(f"{cls.__name__} has one group, got a convolution with groups={dense.groups}.")
        names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")
        options = {name: getattr(dense, name) for name in names}
        has_bias = dense.bias is not None
        return cls(**options, num_terms=n, bias=has_bias, device=weight.device, dtype=weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        channel_dim = type(self).channel_dim
        input, v = self._leading(input, channel_dim)
        input, padding = padded(self, input)
        bias = self.bias if self.bias is None or self.has_all_rows else self.bias[: len(self.u)]
        if self.rebuilds(self._output_positions(input, padding), self.num_terms, len(self.u), v.shape[1]):
            out = self._convolve(input, self.scaled_u() @ v, bias, padding)
        else:
            hidden = self._convolve(input, v, None, padding)
            out = pointwise(hidden, self.scaled_u(), bias, (1,) * len(self.kernel_size), type(self).conv)
        return leading_channels(out, self.out_channels, channel_dim)

    def _output_positions(self, input: Tensor, padding: str | tuple[int, ...]) -> int:
        """Number of positions of the output, before there is one."""
        sizes = input.shape[-len(self.kernel_size) :]
        batch = input.numel() // (input.shape[-len(sizes) - 1] * math.prod(sizes))
        if padding == "same":
            return batch * math.prod(sizes)
        sides = (0,) * len(sizes) if isinstance(padding, str) else padding
        axes = zip(sizes, sides, self.dilation, self.kernel_size, self.stride, strict=True)
        return batch * math.prod((size + 2 * side - d * (k - 1) - 1) // step + 1 for size, side, d, k, step in axes)

    def _convolve(self, input: Tensor, matrix: Tensor, bias: Tensor | None, padding: str | tuple[int, ...]) -> Tensor:
        """This layer's convolution with different outputs, one for each row of ``matrix``."""
        conv, unpadded = type(self).conv, isinstance(padding, str) or not any(padding)
        if unpadded and math.prod(self.kernel_size) == 1:
            return pointwise(input, matrix, bias, self.stride, conv)
        kernel = matrix.view(len(matrix), -1, *self.kernel_size)
        return conv(input, kernel, bias, self.stride, padding, self.dilation)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, num_terms={self.num_terms}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )


def _per_dimension(argument: str, value: Any, num_dims: int, rule: Rule) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) != num_dims:
        remedy = f"; write {(value,) * num_dims}" if isinstance(value, int) and not isinstance(value, bool) else ""
        raise TypeError(f"`{argument}` must be {num_dims} numbers, one for each dimension, got {value!r}{remedy}.")
    return tuple(rule(argument, one) for one in value)


class SpectralShardedConv1d(SpectralShardedConv):
    """``nn.Conv1d`` with one group, held as n singular terms; see `SpectralShardedConv`.

    Example:
        >>> dense, x = torch.nn.Conv1d(3, 8, 5, dilation=2), torch.randn(2, 3, 20)
        >>> torch.allclose(SpectralShardedConv1d.from_dense(dense, num_terms=8)(x), dense(x), atol=1e-5)
        True
    """

    conv = staticmethod(F.conv1d)
    channel_dim = -2


class SpectralShardedConv2d(SpectralShardedConv):
    """``nn.Conv2d`` with one group, held as n singular terms; see `SpectralShardedConv`.

    Example:
        >>> dense, x = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.randn(1, 3, 9, 9)
        >>> torch.allclose(SpectralShardedConv2d.from_dense(dense, num_terms=8)(x), dense(x), atol=1e-5)
        True
    """

    conv = staticmethod(F.conv2d)
    channel_dim = -3


class SpectralShardedConv3d(SpectralShardedConv):
    """``nn.Conv3d`` with one group, held as n singular terms; see `SpectralShardedConv`.

    Example:
        >>> dense, x = torch.nn.Conv3d(2, 6, 3, padding="same"), torch.randn(1, 2, 4, 4, 4)
        >>> torch.allclose(SpectralShardedConv3d.from_dense(dense, num_terms=6)(x), dense(x), atol=1e-5)
        True
    """

    conv = staticmethod(F.conv3d)
    channel_dim = -4


class SpectralShardedGroupedConv(ShardedLayer, nn.Module):
    """Two grouped convolutions: one with n outputs in each group, then a ``1 x 1`` convolution with the bias.

    Create an instance with ``like`` or ``from_dense``, giving the number of terms of each group, the same for all.
    """

    conv: ClassVar[Callable[..., Tensor]]

    def __init__(self, dense: Any, num_terms: tuple[int, ...]) -> None:
        super().__init__()
        if len(set(num_terms)) != 1:
            raise ValueError(f"Every group of a convolution must hold the same number of terms, got {num_terms}.")
        self.in_channels, self.out_channels, self.groups = dense.in_channels, dense.out_channels, dense.groups
        self.weight_shape, self.kernel_size, self.stride = tuple(dense.weight.shape), dense.kernel_size, dense.stride
        self.padding, self.dilation, self.padding_mode = dense.padding, dense.dilation, dense.padding_mode
        self.blocks = self.empty_terms(dense, num_terms)
        self.register_parameter("bias", None if dense.bias is None else nn.Parameter(torch.zeros_like(dense.bias)))

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return row_blocks("weight", dense.weight, [f"blocks.{i}" for i in range(dense.groups)])

    def forward(self, input: Tensor) -> Tensor:
        input, padding = padded(self, input)
        conv, groups = type(self).conv, self.held_terms()
        kernel = torch.cat([group.v for group in groups]).view(-1, *self.weight_shape[1:])
        hidden = conv(input, kernel, None, self.stride, padding, self.dilation, self.groups)
        mix = torch.cat([group.scaled_u() for group in groups])
        return conv(hidden, mix.view(*mix.shape, *(1,) * len(self.kernel_size)), self.bias, groups=self.groups)

    @property
    def weight(self) -> Tensor:
        groups = self.held_terms()
        return self.computed("weight", lambda: torch.cat([g.matrix() for g in groups]).view(self.weight_shape))

    def extra_repr(self) -> str:
        return f"weight_shape={self.weight_shape}, groups={self.groups}, stride={self.stride}, padding={self.padding}"


class SpectralShardedGroupedConv1d(SpectralShardedGroupedConv):
    """``nn.Conv1d`` with groups; see `SpectralShardedGroupedConv`."""

    conv = staticmethod(F.conv1d)


class SpectralShardedGroupedConv2d(SpectralShardedGroupedConv):
    """``nn.Conv2d`` with groups; see `SpectralShardedGroupedConv`.

    Example:
        >>> dense, x = nn.Conv2d(4, 8, 3, groups=2), torch.randn(1, 4, 9, 9)
        >>> torch.allclose(SpectralShardedGroupedConv2d.from_dense(dense, (4, 4))(x), dense(x), atol=1e-5)
        True
    """

    conv = staticmethod(F.conv2d)


class SpectralShardedGroupedConv3d(SpectralShardedGroupedConv):
    """``nn.Conv3d`` with groups; see `SpectralShardedGroupedConv`."""

    conv = staticmethod(F.conv3d)


class SpectralShardedSpatialConv2d(ShardedLayer, SingularTerms):
    """A convolution with a ``1 x k`` kernel and n outputs, followed by one with a ``k x 1`` kernel and the bias.

    The matrix has a row for each output channel and row of the kernel, and a column for each input channel and column
    of the kernel. So it has up to k times as many terms as that of `SpectralShardedConv2d`, each of which is smaller.
    Create an instance from a dense convolution with one group, with ``like`` or ``from_dense``.

    Reference:
        Khodak et al. (2021); Yao et al. (2021), FedHM.

    Example:
        >>> dense, x = nn.Conv2d(3, 8, 3, stride=2, padding=1), torch.randn(1, 3, 9, 9)
        >>> torch.allclose(SpectralShardedSpatialConv2d.from_dense(dense, num_terms=9)(x), dense(x), atol=1e-5)
        True
    """

    bias: nn.Parameter | None

    def __init__(self, dense: nn.Conv2d, num_terms: int) -> None:
        super().__init__(self.blocks_of(dense)[0].shape, num_terms, dense.weight.device, dense.weight.dtype)
        self.in_channels, self.out_channels, self.groups = dense.in_channels, dense.out_channels, dense.groups
        self.weight_shape, self.kernel_size, self.stride = tuple(dense.weight.shape), dense.kernel_size, dense.stride
        self.padding, self.dilation, self.padding_mode = dense.padding, dense.dilation, dense.padding_mode
        self.register_parameter("bias", None if dense.bias is None else nn.Parameter(torch.zeros_like(dense.bias)))

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        rows, columns = as_rows(dense.weight, spatial=True).shape
        return (WeightBlock("", "weight", (0, rows), (rows, columns), spatial=True),)

    @classmethod
    def like(cls, dense: Any, num_terms: NumTerms) -> SpectralShardedSpatialConv2d:
        return cls(dense, *counts(num_terms))

    def forward(self, input: Tensor) -> Tensor:
        n, (down, across), (rows, columns) = self.num_terms, self.stride, self.kernel_size
        input, padding = padded(self, input)
        below, beside = (padding, padding) if isinstance(padding, str) else ((padding[0], 0), (0, padding[1]))
        along = self.v.view(n, -1, 1, columns)
        hidden = F.conv2d(input, along, None, (1, across), beside, (1, self.dilation[1]))
        upright = self.scaled_u().view(-1, rows, n).transpose(1, 2).unsqueeze(-1)
        return F.conv2d(hidden, upright, self.bias, (down, 1), below, (self.dilation[0], 1))

    @property
    def weight(self) -> Tensor:
        return self.computed("weight", lambda: from_rows(self.matrix(), self.weight_shape, spatial=True))

    def extra_repr(self) -> str:
        return (
            f"weight_shape={self.weight_shape}, num_terms={self.num_terms}, stride={self.stride}, "
            f"padding={self.padding}"
        )


def padded(layer: Any, input: Tensor) -> tuple[Tensor, Any]:
    """The input of a convolution, padded unless that is with zeros, and the padding that is left to torch."""
    if layer.padding_mode == "zeros":
        return input, layer.padding
    if layer.padding == "valid":
        return input, "valid"
    totals = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    if layer.padding == "same":  # an odd number puts one more at the end, as in torch
        sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    else:
        sides = [size for size in reversed(layer.padding) for _ in range(2)]
    return F.pad(input, sides, mode=layer.padding_mode), "valid"


def pointwise(
    x: Tensor, matrix: Tensor, bias: Tensor | None, stride: tuple[int, ...], conv: Callable[..., Tensor]
) -> Tensor:
    """A convolution whose kernel has size one in each dimension, computed by matrix products where they are faster.

    ``x`` has the shape ``(batch, columns, *positions)``, or none of the batch; ``matrix`` has ``(rows, columns)`` and
    ``bias`` ``(rows,)``. ``conv`` is the torch convolution with as many dimensions as ``stride``.
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
    """
    return num_values <= 1024 * max(32, num_positions)
