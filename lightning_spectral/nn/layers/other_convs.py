"""Convolutions with several groups, and those held as terms of their spatial matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock, as_rows, from_rows, row_blocks
from lightning_spectral.nn.layers.conv import padded
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import SingularTerms

ConvT = TypeVar("ConvT", bound="SpectralShardedGroupedConv")


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
        self.weight_shape = tuple(dense.weight.shape)
        self.stride, self.padding, self.dilation = dense.stride, dense.padding, dense.dilation
        self.kernel_size, self.padding_mode = dense.kernel_size, dense.padding_mode
        where = dense.weight.device, dense.weight.dtype
        shape = self.blocks_of(dense)[0].shape
        self.blocks = nn.ModuleDict({str(i): SingularTerms(shape, n, *where) for i, n in enumerate(num_terms)})
        self.register_parameter("bias", None if dense.bias is None else nn.Parameter(torch.zeros_like(dense.bias)))

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return row_blocks("weight", dense.weight, [f"blocks.{i}" for i in range(dense.groups)])

    @classmethod
    def like(cls: type[ConvT], dense: Any, num_terms: NumTerms) -> ConvT:
        return cls(dense, counts(num_terms))

    def forward(self, input: Tensor) -> Tensor:
        input, padding = padded(self, input)
        conv, groups = type(self).conv, self.held_terms()
        kernel = torch.cat([group.v for group in groups]).view(-1, *self.weight_shape[1:])
        hidden = conv(input, kernel, None, self.stride, padding, self.dilation, self.groups)
        mix = torch.cat([group.scaled_u() for group in groups])
        return conv(hidden, mix.view(*mix.shape, *(1,) * len(self.kernel_size)), self.bias, groups=self.groups)

    @property
    def weight(self) -> Tensor:
        return self.computed("weight", self._dense)

    def _dense(self) -> Tensor:
        return torch.cat([group.matrix() for group in self.held_terms()]).view(self.weight_shape)

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
        self.weight_shape = tuple(dense.weight.shape)
        self.stride, self.padding, self.dilation = dense.stride, dense.padding, dense.dilation
        self.kernel_size, self.padding_mode = dense.kernel_size, dense.padding_mode
        self.in_channels, self.out_channels, self.groups = dense.in_channels, dense.out_channels, dense.groups
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
