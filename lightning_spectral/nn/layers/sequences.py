"""Layers over sequences whose weights are held as singular terms: multi-head attention, LSTM and GRU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer
from lightning_spectral.nn.layers.terms import SingularTerms, WeightBlock, row_blocks

if TYPE_CHECKING:  # a mix-in for nn.LSTM and nn.GRU
    _Base = nn.RNNBase
else:
    _Base = object

ROLES = ("q", "k", "v")
RecurrentT = TypeVar("RecurrentT", bound="SpectralShardedRecurrent")


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
        self.blocks = self.empty_terms(dense, num_terms)
        bias = dense.in_proj_bias
        self.register_parameter("in_proj_bias", None if bias is None else nn.Parameter(torch.zeros_like(bias)))
        self.out_proj = dense.out_proj

    @classmethod
    def blocks_of(cls, dense: nn.MultiheadAttention, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        if dense.in_proj_weight is not None:
            return row_blocks("in_proj_weight", dense.in_proj_weight, [f"blocks.{role}" for role in ROLES])
        names = {role: f"{role}_proj_weight" for role in ROLES}
        return tuple(row_blocks(n, dense.get_parameter(n), [f"blocks.{role}"])[0] for role, n in names.items())

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
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        heads = []  # of shape (batch, heads, positions, head_dim); reordered after projecting, so no input is copied
        for role, x, bias in zip(ROLES, (query, key, value), biases, strict=True):
            projected = self._block(role).linear(x, bias)
            split = projected.view(*projected.shape[:-1], self.num_heads, self.head_dim)
            if x.dim() == 2:  # without a batch
                split = split.unsqueeze(0)
            elif not self.batch_first:
                split = split.transpose(0, 1)
            heads.append(split.transpose(1, 2))
        q, k, v = heads
        mask = None  # both masks as numbers to add to the scores
        for given, is_padding in ((attn_mask, False), (key_padding_mask, True)):
            if given is None:
                continue
            if given.dtype == torch.bool:
                added = torch.zeros_like(given, dtype=q.dtype).masked_fill_(given, float("-inf"))
            else:
                added = given.to(q.dtype)
            if is_padding:
                added = added.view(-1, 1, 1, k.shape[-2])
            elif added.dim() != 2:
                added = added.view(q.shape[0], -1, *added.shape[1:])
            mask = added if mask is None else mask + added
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            attention = (scores if mask is None else scores + mask).softmax(dim=-1)
            attention = F.dropout(attention, self.dropout, self.training)
            mixed = attention @ v
        else:
            attention = None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        batched = query.dim() == 3
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


class SpectralShardedRecurrent(ShardedLayer, _Base):
    """A recurrent layer with each gate's part of ``weight_ih`` and ``weight_hh``, and ``weight_hr``, held as terms.

    Each of these blocks is factorised separately. Each pass rebuilds the weights once and hands them to torch's own
    kernel, which uses them at every time step. Memory between passes and communication are those of the terms; the time
    is that of the dense layer, and so are shapes, packed sequences, layers and directions.

    Create an instance with ``like`` or ``from_dense``, giving the number of terms of every block.
    """

    gates: ClassVar[tuple[str, ...]]

    @classmethod
    def blocks_of(cls, dense: Any, num_parts: int = 1) -> tuple[WeightBlock, ...]:
        return tuple(
            block
            for name in dense._flat_weights_names
            if name.startswith("weight")
            for block in row_blocks(name, dense.get_parameter(name), cls._block_names(name))
        )

    @classmethod
    def _block_names(cls, name: str) -> list[str]:
        if name.startswith("weight_hr"):  # the projection of an LSTM: after the gates
            return [f"blocks.{name}"]
        return [f"blocks.{name}_{gate}" for gate in cls.gates]

    @classmethod
    def like(cls: type[RecurrentT], dense: Any, num_terms: NumTerms) -> RecurrentT:
        names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")
        options = {name: getattr(dense, name) for name in names}
        if dense.proj_size:
            options["proj_size"] = dense.proj_size
        layer = cls(**options, device="meta", dtype=dense.weight_hh_l0.dtype)  # so weights are never allocated
        for name, parameter in dense.named_parameters(recurse=False):
            del layer._parameters[name]
            if not name.startswith("weight"):
                layer.register_parameter(name, nn.Parameter(torch.zeros_like(parameter)))
        layer.blocks, layer._flat_weights = cls.empty_terms(dense, num_terms), []
        return layer.train(dense.training)

    def forward(self, input: Any, hx: Any = None) -> Any:
        weights: list[Any] = []
        for name in self._flat_weights_names:
            if name.startswith("weight"):
                blocks = [self.get_submodule(block) for block in self._block_names(name)]
                weights.append(torch.cat([block.matrix() for block in blocks if isinstance(block, SingularTerms)]))
            else:
                weights.append(self.get_parameter(name))
        self._flat_weights = weights
        try:
            return super().forward(input, hx)
        finally:
            self._flat_weights = []  # they belong to this pass, and cannot be copied or pickled

    def flatten_parameters(self) -> None:
        """Do nothing: no weight lasts beyond a pass, in which `forward` has rebuilt it."""

    _update_flat_weights = flatten_parameters  # torch would look for parameters there


class SpectralShardedLSTM(SpectralShardedRecurrent, nn.LSTM):
    """An ``nn.LSTM`` of singular terms, a `SpectralShardedRecurrent` with blocks in the order i, f, g, o.

    Example:
        >>> dense, x = nn.LSTM(4, 6), torch.randn(5, 2, 4)
        >>> sharded = SpectralShardedLSTM.from_dense(dense, [4] * 4 + [6] * 4)
        >>> torch.allclose(sharded(x)[0], dense(x)[0], atol=1e-5)
        True
    """

    gates = ("i", "f", "g", "o")


class SpectralShardedGRU(SpectralShardedRecurrent, nn.GRU):
    """An ``nn.GRU`` of singular terms, a `SpectralShardedRecurrent` with blocks in the order r, z, n."""

    gates = ("r", "z", "n")
