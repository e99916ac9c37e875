"""LSTM and GRU whose gates are held as singular terms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_spectral.nn.layers.blocks import WeightBlock, row_blocks
from lightning_spectral.nn.layers.sharded import NumTerms, ShardedLayer, counts
from lightning_spectral.nn.layers.terms import SingularTerms

if TYPE_CHECKING:  # a mix-in for nn.LSTM and nn.GRU
    _Base = nn.RNNBase
else:
    _Base = object

RecurrentT = TypeVar("RecurrentT", bound="SpectralShardedRecurrent")


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
        first = dense.weight_hh_l0
        layer = cls(**options, device="meta", dtype=first.dtype)  # "meta": weights that are never allocated
        layer._swap_weights(dense, counts(num_terms), first.device)
        return layer.train(dense.training)

    def _swap_weights(self, dense: Any, num_terms: tuple[int, ...], device: torch.device) -> None:
        blocks, dtype = self.blocks_of(dense), dense.weight_hh_l0.dtype
        self._dense_shapes = {name: tuple(p.shape) for name, p in dense.named_parameters() if name.startswith("weight")}
        for name, parameter in dense.named_parameters(recurse=False):
            del self._parameters[name]
            if name not in self._dense_shapes:
                self.register_parameter(name, nn.Parameter(torch.zeros_like(parameter)))
        terms = [SingularTerms(block.shape, n, device, dtype) for block, n in zip(blocks, num_terms, strict=True)]
        names = [block.name.removeprefix("blocks.") for block in blocks]
        self.blocks = nn.ModuleDict(dict(zip(names, terms, strict=True)))
        self._flat_weights = []

    def forward(self, input: Any, hx: Any = None) -> Any:
        self._flat_weights = [self._dense_tensor(name) for name in self._flat_weights_names]
        try:
            return super().forward(input, hx)
        finally:
            self._flat_weights = []  # they belong to this pass, and cannot be copied or pickled

    def _dense_tensor(self, name: str) -> Tensor:
        if name not in self._dense_shapes:
            return self.get_parameter(name)
        blocks = [self.blocks[block.removeprefix("blocks.")] for block in self._block_names(name)]
        return torch.cat([block.matrix() for block in blocks if isinstance(block, SingularTerms)])

    def _update_flat_weights(self) -> None:
        """Do nothing: torch would look for parameters here, and `forward` has rebuilt them."""

    def flatten_parameters(self) -> None:
        """Do nothing: no weight lasts beyond a pass."""


def sequence_values(input: Tensor | PackedSequence, hx: Any = None) -> Tensor:
    """The vectors that a recurrent layer reads when called with ``input`` and ``hx``; shape ``(..., input_size)``."""
    return input.data if isinstance(input, PackedSequence) else input


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
