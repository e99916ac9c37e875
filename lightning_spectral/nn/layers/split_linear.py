"""A linear layer that packs several, such as q, k and v, each with its own singular terms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock, row_blocks
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import SingularTerms


class SpectralShardedSplitLinear(ShardedLayer, nn.Module):
    """A linear layer whose outputs are split into equal parts that are factorised separately.

    Args:
        in_features: Size of each input example.
        out_features: Size of each output example, divisible by the number of parts.
        num_terms: Number of singular terms of each part.
        bias: Whether there is a bias.
        device: As in other ``torch.nn`` modules.
        dtype: As in other ``torch.nn`` modules.

    Shape:
        Input ``(..., in_features)``, output ``(..., out_features)``.

    Example:
        >>> qkv = nn.Linear(4, 12)
        >>> x = torch.randn(2, 4)
        >>> torch.allclose(SpectralShardedSplitLinear.from_dense(qkv, (4, 4, 4))(x), qkv(x), atol=1e-5)
        True
    """

    channel_dim = -1
    transposed = False
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: tuple[int, ...],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        height = out_features // len(num_terms)
        parts = [SingularTerms((height, in_features), n, device, dtype) for n in num_terms]
        self.blocks = nn.ModuleDict({str(i): part for i, part in enumerate(parts)})
        empty = torch.zeros(out_features, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(empty) if bias else None)

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        """One block for each of ``num_parts`` equal parts of the outputs."""
        return row_blocks("weight", dense.weight, [f"blocks.{i}" for i in range(num_parts)], cls.transposed)

    @classmethod
    def like(cls, dense: Any, num_terms: NumTerms) -> SpectralShardedSplitLinear:
        """An empty layer of the shape of ``dense`` with as many parts as there are numbers of terms."""
        num_terms = counts(num_terms)
        blocks, weight = cls.blocks_of(dense, len(num_terms)), dense.weight
        (height, columns), bias = blocks[0].shape, dense.bias is not None
        return cls(columns, height * len(blocks), num_terms, bias, weight.device, weight.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """Apply every part and join the outputs."""
        out = torch.cat([part.linear(input) for part in self.held_terms()], dim=-1)
        return out if self.bias is None else out + self.bias

    @property
    def weight(self) -> Tensor:
        """The effective dense weight, in the orientation of the dense layer; differentiable."""
        return self.computed("weight", lambda: self._rows().T if self.transposed else self._rows())

    def _rows(self) -> Tensor:
        return torch.cat([part.matrix() for part in self.held_terms()])


class SpectralShardedSplitTransposedLinear(SpectralShardedSplitLinear):
    """The same for a weight that is stored transposed, as in transformers' ``Conv1D``.

    Args:
        in_features: As in `SpectralShardedSplitLinear`, like the other arguments.
    """

    transposed = True
