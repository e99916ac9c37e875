"""Multi-head attention whose projections are held as singular terms."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.blocks import WeightBlock, row_blocks
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import SingularTerms

ROLES = ("q", "k", "v")


class SpectralShardedMultiheadAttention(ShardedLayer, nn.Module):
    """``nn.MultiheadAttention`` with q, k and v factorised separately.

    The output projection ``out_proj`` is a separate layer: it is kept as it is here, and swapped like any linear layer.
    Create an instance with ``like`` or ``from_dense``, giving the numbers of terms of q, k and v. Shapes, masks and
    attention weights are those of ``nn.MultiheadAttention``, except nested tensors.

    Example:
        >>> dense = nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 8)
        >>> ours, theirs = SpectralShardedMultiheadAttention.from_dense(dense, (8, 8, 8))(x, x, x), dense(x, x, x)
        >>> torch.allclose(ours[0], theirs[0], atol=1e-5), torch.allclose(ours[1], theirs[1], atol=1e-5)
        (True, True)
    """

    # Torch's encoder layers check this before they read a packed weight and skip this module's `forward`.
    _qkv_same_embed_dim = False
    channel_dim = -1

    in_proj_bias: nn.Parameter | None
    out_proj: nn.Module

    def __init__(self, dense: nn.MultiheadAttention, num_terms: tuple[int, ...]) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = dense.embed_dim, dense.num_heads, dense.head_dim
        self.dropout, self.batch_first = dense.dropout, dense.batch_first
        blocks = zip(ROLES, self.blocks_of(dense), num_terms, strict=True)
        where = dense.out_proj.weight.device, dense.out_proj.weight.dtype
        self.blocks = nn.ModuleDict({role: SingularTerms(block.shape, n, *where) for role, block, n in blocks})
        bias = dense.in_proj_bias
        self.register_parameter("in_proj_bias", None if bias is None else nn.Parameter(torch.zeros_like(bias)))
        self.out_proj = dense.out_proj

    @classmethod
    def blocks_of(cls, dense: nn.MultiheadAttention, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        if dense.in_proj_weight is not None:
            return row_blocks("in_proj_weight", dense.in_proj_weight, [f"blocks.{role}" for role in ROLES])
        names = {role: f"{role}_proj_weight" for role in ROLES}
        return tuple(row_blocks(n, dense.get_parameter(n), [f"blocks.{role}"])[0] for role, n in names.items())

    @classmethod
    def like(cls, dense: nn.MultiheadAttention, num_terms: NumTerms) -> SpectralShardedMultiheadAttention:
        return cls(dense, counts(num_terms))

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The effective packed weight, for modules that read it; ``None`` where q, k and v differ in size."""
        if len({self._block(role).v.shape[1] for role in ROLES}) > 1:
            return None
        return self.computed("in_proj_weight", lambda: torch.cat([self._block(role).matrix() for role in ROLES]))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal=True` says that `attn_mask` is causal; give the mask too, as torch asks.")
        batched = query.dim() == 3
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (self._heads(*item) for item in zip(ROLES, (query, key, value), biases, strict=True))
        mask = self._merged_mask(attn_mask, key_padding_mask, q, k)
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            attention = (scores if mask is None else scores + mask).softmax(dim=-1)
            attention = F.dropout(attention, self.dropout, self.training)
            mixed = attention @ v
        else:
            attention = None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        out = out if self.batch_first or not batched else out.transpose(0, 1)
        if attention is not None and average_attn_weights:
            attention = attention.mean(dim=1)
        if not batched:
            return out.squeeze(0), None if attention is None else attention.squeeze(0)
        return out, attention

    def _block(self, role: str) -> SingularTerms:
        block = self.blocks[role]
        assert isinstance(block, SingularTerms)
        return block

    def _heads(self, role: str, x: Tensor, bias: Tensor | None) -> Tensor:
        """Project, then reorder, so that no input is copied. Shape (batch, heads, positions, head_dim)."""
        projected = self._block(role).linear(x, bias)
        heads = projected.view(*projected.shape[:-1], self.num_heads, self.head_dim)
        if x.dim() == 2:  # without a batch
            heads = heads.unsqueeze(0)
        elif not self.batch_first:
            heads = heads.transpose(0, 1)
        return heads.transpose(1, 2)

    def _merged_mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
        """Both masks as numbers to add to the scores, broadcastable to (batch, heads, targets, sources)."""
        masks = []
        if attn_mask is not None:
            mask = _additive(attn_mask, q)
            masks.append(mask if mask.dim() == 2 else mask.view(q.shape[0], -1, *mask.shape[1:]))
        if padding is not None:
            masks.append(_additive(padding, q).view(-1, 1, 1, k.shape[-2]))
        return sum(masks[1:], masks[0]) if masks else None


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as numbers to add to the scores: minus infinity where a boolean mask is ``True``."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))


def check_attention(dense: Any) -> str | None:
    """The reason why an attention cannot be sharded; ``None`` if it can."""
    if dense.bias_k is not None or dense.add_zero_attn:
        return "`add_bias_kv` and `add_zero_attn` are not supported"
    return None
