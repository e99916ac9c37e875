"""Linear layers held as n singular terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock, row_blocks
from lightning_spectral.nn.layers.sharded import SIZE, NumTerms, SpectralShardedLayer, counts


class SpectralShardedLinear(SpectralShardedLayer):
    r"""A linear layer ``y = (x V^T) (U diag(omega))^T + b``: two thin products instead of one.

    Args:
        in_features: Size of each input example.
        out_features: Size of each output example.
        num_terms: Number n of singular terms held, ``1 <= n <= min(in_features, out_features)``.
        bias: Whether there is a bias.
        device: As in other ``torch.nn`` modules.
        dtype: As in other ``torch.nn`` modules.

    Shape:
        Input ``(..., in_features)``, output ``(..., out_features)``.

    Raises:
        ValueError: If ``num_terms`` is out of range.

    Note:
        With ``n = N`` the layer computes the same as the dense one, but has more parameters and trains differently. If
        the factors would take more multiplications than rebuilding and applying the weight, the weight is rebuilt once
        per pass instead.

    Example:
        >>> dense = nn.Linear(6, 4)
        >>> sharded = SpectralShardedLinear.from_dense(dense, num_terms=4)
        >>> x = torch.randn(2, 6)
        >>> torch.allclose(sharded(x), dense(x), atol=1e-5)
        True
    """

    channel_dim = -1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        in_features, out_features = SIZE("in_features", in_features), SIZE("out_features", out_features)
        super().__init__((out_features, in_features), num_terms, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features

    @classmethod
    def like(cls, dense: nn.Linear, num_terms: NumTerms) -> SpectralShardedLinear:
        """An empty layer of the shape of ``dense``."""
        (block,) = cls.blocks_of(dense)
        (n,), (rows, columns), weight = counts(num_terms), block.shape, dense.weight
        return cls(columns, rows, n, dense.bias is not None, weight.device, weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        return self.linear(input, self.bias)

    def extra_repr(self) -> str:
        """The text that ``print`` shows for the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_terms={self.num_terms}, "
            f"bias={self.bias is not None}"
        )


class SpectralShardedTransposedLinear(SpectralShardedLinear):
    """A linear layer whose dense weight is stored transposed, ``(in_features, out_features)``.

    That is the ``Conv1D`` of the transformers library, which is not a convolution.

    Args:
        in_features: As in `SpectralShardedLinear`, like the other arguments.
    """

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        """The weight, transposed, as a single block."""
        return row_blocks("weight", dense.weight, [""], transposed=True)

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, shape ``(in_features, out_features)``."""
        return self.computed("weight", lambda: self.matrix().T)
