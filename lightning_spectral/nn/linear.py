"""A linear layer held as n singular terms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.sharded import SpectralShardedLayer


class SpectralShardedLinear(SpectralShardedLayer):
    r"""``y = (x V^T) (U diag(omega))^T + b``: two thin products instead of one.

    Args:
        in_features: Size of each input example.
        out_features: Size of each output example.
        num_terms: Number n of singular terms held, ``1 <= n <= min(in_features, out_features)``.
        bias: Whether there is a bias.
        device: As everywhere in ``torch.nn``.
        dtype: As everywhere in ``torch.nn``.

    Shape:
        Input ``(..., in_features)``, output ``(..., out_features)``.

    Raises:
        ValueError: If ``num_terms`` is out of range.

    Note:
        At ``n = N`` the layer computes what the dense one does, but with more parameters, and it trains differently.

    Example:
        >>> dense = nn.Linear(6, 4)
        >>> sharded = SpectralShardedLinear.from_dense(dense, num_terms=4)
        >>> x = torch.randn(2, 6)
        >>> torch.allclose(sharded(x), dense(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__((out_features, in_features), num_terms, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features

    @classmethod
    def from_dense(cls, dense: nn.Linear, num_terms: int) -> SpectralShardedLinear:
        """The layer that holds the ``num_terms`` largest singular terms of ``dense``."""
        layer = cls.like(dense, num_terms)
        layer.load_dense(dense.weight, dense.bias)
        return layer

    @classmethod
    def like(cls, dense: nn.Linear, num_terms: int) -> SpectralShardedLinear:
        """An empty layer of the shape of ``dense``: its terms arrive later by ``load_terms``."""
        weight = dense.weight
        return cls(
            dense.in_features, dense.out_features, num_terms, dense.bias is not None, weight.device, weight.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(F.linear(x, self.v), self.u * self.omega, self.bias)

    def extra_repr(self) -> str:
        """What ``print`` shows of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_terms={self.num_terms}, "
            f"bias={self.bias is not None}"
        )
