"""A two-dimensional convolution held as n singular terms of its spatial matrix: along rows, then along columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock, as_rows, from_rows
from lightning_spectral.nn.layers.conv import explicit_padding
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import SingularTerms


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
        (n,) = counts(num_terms)
        return cls(dense, n)

    def forward(self, input: Tensor) -> Tensor:
        n, padding = self.num_terms, self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._sides(), self.padding_mode), "valid"
        (down, across), (rows, columns) = self.stride, self.kernel_size
        below: Any = padding if isinstance(padding, str) else (padding[0], 0)
        beside: Any = padding if isinstance(padding, str) else (0, padding[1])
        along = self.v.view(n, -1, 1, columns)
        hidden = F.conv2d(input, along, None, (1, across), beside, (1, self.dilation[1]))
        upright = self.scaled_u().view(-1, rows, n).transpose(1, 2).unsqueeze(-1)
        return F.conv2d(hidden, upright, self.bias, (down, 1), below, (self.dilation[0], 1))

    def _sides(self) -> list[int]:
        return explicit_padding(self.padding, self.kernel_size, self.dilation)

    @property
    def weight(self) -> Tensor:
        return self.computed("weight", lambda: from_rows(self.matrix(), self.weight_shape, spatial=True))

    def extra_repr(self) -> str:
        return (
            f"weight_shape={self.weight_shape}, num_terms={self.num_terms}, stride={self.stride}, "
            f"padding={self.padding}"
        )
