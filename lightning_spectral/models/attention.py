"""Multi-head self-attention from ordinary linear layers."""

import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Scaled dot-product attention of a sequence to itself, with four `nn.Linear` of width x width.

    Queries, keys and values are three layers instead of one packed layer, so that spectral sharding gives each its own
    singular terms without being told where to cut (Korzhenkov & Louizos 2024 do not say which of the two they
    decompose). At the same keep ratio a packed layer of 3 width x width would keep only as many terms in total as each
    of the three does here, and be 1.5 times smaller.

    Args:
        width: Size of each position's vector: input and output have shape ``(batch, length, width)``.
        num_heads: Number of heads; must divide ``width``.
        qkv_bias: Whether queries, keys and values have a bias; the output always has one.
        dropout: Probability of dropping an attention weight while training.
        causal: Whether to prevent each position from attending to later ones.

    Reference:
        Vaswani et al., "Attention is all you need" (2017), section 3.2.

    Example:
        >>> import torch
        >>> SelfAttention(width=8, num_heads=2, causal=True)(torch.zeros(3, 5, 8)).shape
        torch.Size([3, 5, 8])
    """

    def __init__(
        self, width: int, num_heads: int, qkv_bias: bool = True, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"`num_heads` must divide `width`, got {num_heads} heads for width {width}.")
        self.num_heads = num_heads
        self.dropout = dropout
        self.causal = causal
        self.query = nn.Linear(width, width, qkv_bias)
        self.key = nn.Linear(width, width, qkv_bias)
        self.value = nn.Linear(width, width, qkv_bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        mixed: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return mixed
