"""Linear layers held as n singular terms, or as several parts, such as q, k and v, each with its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.sharded import SIZE, NumTerms, ShardedLayer, SpectralShardedLayer, counts
from lightning_spectral.nn.layers.terms import WeightBlock, row_blocks


class SpectralShardedLinear(SpectralShardedLayer):
    """A linear layer ``y = (x V^T) (U diag(omega))^T + b``: two thin products instead of one.

    It holds n singular terms, ``1 <= n <= min(in_features, out_features)``. If the factors would take more
    multiplications than rebuilding and applying the weight, the weight is rebuilt once per pass instead.

    Shape:
        Input ``(..., in_features)``, output ``(..., out_features)``.

    Note:
        With ``n = N`` the layer computes the same as the dense one, but has more parameters and trains differently.

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
        (block,) = cls.blocks_of(dense)
        (n,), (rows, columns), weight = counts(num_terms), block.shape, dense.weight
        return cls(columns, rows, n, dense.bias is not None, weight.device, weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return self.linear(input, self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, num_terms={self.num_terms}, "
            f"bias={self.bias is not None}"
        )


class SpectralShardedTransposedLinear(SpectralShardedLinear):
    """A linear layer stored transposed, ``(in_features, out_features)``: the ``Conv1D`` of transformers."""

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return row_blocks("weight", dense.weight, [""], transposed=True)

    @property
    def weight(self) -> Tensor:
        return self.computed("weight", lambda: self.matrix().T)


class SpectralShardedSplitLinear(ShardedLayer, nn.Module):
    """A linear layer whose outputs are split into equal parts that are factorised separately.

    Create an instance with ``like`` or ``from_dense``, giving the number of terms of each part.

    Example:
        >>> qkv = nn.Linear(4, 12)
        >>> x = torch.randn(2, 4)
        >>> torch.allclose(SpectralShardedSplitLinear.from_dense(qkv, (4, 4, 4))(x), qkv(x), atol=1e-5)
        True
    """

    channel_dim = -1
    transposed = False
    bias: nn.Parameter | None

    def __init__(self, dense: Any, num_terms: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = self.empty_terms(dense, num_terms)
        parts = self.held_terms()
        self.in_features, self.out_features = parts[0].v.shape[1], sum(part.num_rows for part in parts)
        self.register_parameter("bias", None if dense.bias is None else nn.Parameter(torch.zeros_like(dense.bias)))

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return row_blocks("weight", dense.weight, [f"blocks.{i}" for i in range(num_parts)], cls.transposed)

    def forward(self, input: Tensor) -> Tensor:
        out = torch.cat([part.linear(input) for part in self.held_terms()], dim=-1)
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        def dense() -> Tensor:
            rows = torch.cat([part.matrix() for part in self.held_terms()])
            return rows.T if self.transposed else rows

        return self.computed("weight", dense)


class SpectralShardedSplitTransposedLinear(SpectralShardedSplitLinear):
    """The same for a weight that is stored transposed, as in transformers' ``Conv1D``."""

    transposed = True
