"""A convolution held as n singular terms: a k x k convolution with n outputs, then a 1 x 1 convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.sharded import SpectralShardedLayer


class SpectralShardedConv2d(SpectralShardedLayer):
    """A ``k x k`` convolution with n output channels followed by a ``1 x 1`` one that carries the bias.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Height and width of the kernel.
        num_terms: Number n of singular terms held, ``1 <= n <= min(out_channels, in_channels * kh * kw)``.
        stride: As in ``nn.Conv2d``; so are the remaining arguments.
        padding: A pair, or ``"same"`` / ``"valid"``.
        dilation: Spacing of the kernel.
        bias: Whether there is a bias.
        padding_mode: ``"zeros"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        device: As everywhere in ``torch.nn``.
        dtype: As everywhere in ``torch.nn``.

    Shape:
        As ``nn.Conv2d`` with ``groups=1``.

    Raises:
        ValueError: If ``num_terms`` is out of range.

    Reference:
        Niu et al. (2022), section 3.2.1; Korzhenkov & Louizos (2024), section 4.1.

    Example:
        >>> dense = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        >>> sharded = SpectralShardedConv2d.from_dense(dense, num_terms=8)
        >>> x = torch.randn(1, 3, 9, 9)
        >>> torch.allclose(sharded(x), dense(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        num_terms: int,
        stride: tuple[int, int] = (1, 1),
        padding: str | tuple[int, int] = (0, 0),
        dilation: tuple[int, int] = (1, 1),
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_channels, in_channels, *kernel_size), num_terms, bias, device, dtype)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.stride = stride
        self.padding = padding
        self.dilation = dilation
        self.groups = 1
        self.padding_mode = padding_mode

    @classmethod
    def from_dense(cls, dense: nn.Conv2d, num_terms: int) -> SpectralShardedConv2d:
        """The layer that holds the ``num_terms`` largest singular terms of ``dense``."""
        layer = cls.like(dense, num_terms)
        layer.load_dense(dense.weight, dense.bias)
        return layer

    @classmethod
    def like(cls, dense: nn.Conv2d, num_terms: int) -> SpectralShardedConv2d:
        """An empty layer of the shape of ``dense``: its terms arrive later by ``load_terms``.

        Raises:
            ValueError: If ``dense`` has more than one group.
        """
        if dense.groups != 1:
            raise ValueError(f"A sharded convolution has one group, got groups={dense.groups}; keep this layer dense.")
        out_channels, in_channels, height, width = dense.weight.shape
        return cls(
            in_channels,
            out_channels,
            (height, width),
            num_terms,
            stride=_pair(dense.stride),
            padding=dense.padding if isinstance(dense.padding, str) else _pair(dense.padding),
            dilation=_pair(dense.dilation),
            bias=dense.bias is not None,
            padding_mode=dense.padding_mode,
            device=dense.weight.device,
            dtype=dense.weight.dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._explicit_padding(), mode=self.padding_mode), (0, 0)
        kernel = self.v.view(self.num_terms, *self.weight_shape[1:])
        hidden = F.conv2d(x, kernel, None, self.stride, padding, self.dilation)
        return F.conv2d(hidden, (self.u * self.omega)[:, :, None, None], self.bias)

    def _explicit_padding(self) -> list[int]:
        """Padding for ``F.pad``: (left, right, top, bottom)."""
        if self.padding == "valid":
            return [0, 0, 0, 0]
        if isinstance(self.padding, str):  # "same": what is odd goes to the right and the bottom, as in nn.Conv2d
            totals = [d * (k - 1) for d, k in zip(self.dilation, self.kernel_size, strict=True)]
            return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
        return [side for size in reversed(self.padding) for side in (size, size)]

    def extra_repr(self) -> str:
        """What ``print`` shows of the layer."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, num_terms={self.num_terms}, "
            f"stride={self.stride}, padding={self.padding}, bias={self.bias is not None}"
        )


def _pair(sizes: tuple[int, ...]) -> tuple[int, int]:
    height, width = sizes
    return height, width
