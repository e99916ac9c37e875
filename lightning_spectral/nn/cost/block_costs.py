"""What n terms of one block of a weight cost a client."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

from lightning_spectral.nn.layers.blocks import WeightBlock
from lightning_spectral.nn.layers.conv import SpectralShardedConv
from lightning_spectral.nn.layers.grouped_conv import SpectralShardedGroupedConv
from lightning_spectral.nn.layers.recurrent import SpectralShardedRecurrent
from lightning_spectral.nn.layers.terms import rebuilding_is_cheaper
from lightning_spectral.nn.plan.layer_types import ShardedType


@dataclass(frozen=True)
class Cost:
    """What a model, or a part of one, costs a client.

    Attributes:
        parameters: Number of values in its parameters, tied ones once; the frozen multipliers are not among them.
        macs: Multiply-accumulate operations of one forward pass.
        kept_values: Values that one forward pass keeps for backward, beyond parameters, buffers and inputs.
        kept_bytes: Bytes of the same.
        downlink_bytes: Bytes sent to the client in a round.
        uplink_bytes: Bytes it sends back.
    """

    parameters: int = 0
    macs: int = 0
    kept_values: int = 0
    kept_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0

    @property
    def round_bytes(self) -> int:
        """Bytes that travel in a round, down and up."""
        return self.downlink_bytes + self.uplink_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class BlockCall(NamedTuple):
    """One time that a pass applies a block.

    Attributes:
        positions: Number of vectors that it is applied to.
        input_needs_grad: Whether they have a gradient.
        keeps: Whether autograd keeps anything for backward.
    """

    positions: int
    input_needs_grad: bool
    keeps: bool


@dataclass(frozen=True)
class BlockUse:
    """One block of a sharded weight, and every time that a pass applies it.

    Attributes:
        block: Which matrix.
        layer: The class of the sharded layer, which decides how the terms are applied.
        value_bytes: Bytes of one value.
        calls: In order.
    """

    block: WeightBlock
    layer: ShardedType
    value_bytes: int
    calls: tuple[BlockCall, ...]

    def cost(self, num_terms: int) -> Cost:
        """What n terms of the block cost, beyond what the layer costs whatever their number.

        Args:
            num_terms: Number n of terms.
        """
        factors = num_terms * sum(self.block.shape)
        kept = sum(self._kept_values(call, num_terms) for call in self.calls if call.keeps)
        return Cost(
            parameters=factors,
            macs=sum(self._macs(call, num_terms) for call in self.calls),
            kept_values=kept,
            kept_bytes=kept * self.value_bytes,
            downlink_bytes=(factors + num_terms) * self.value_bytes,  # with the multipliers
            uplink_bytes=factors * self.value_bytes,
        )

    def _macs(self, call: BlockCall, num_terms: int) -> int:
        rows, columns = self.block.shape
        if issubclass(self.layer, SpectralShardedRecurrent):
            return num_terms * rows * columns
        if self._is_rebuilt(call, num_terms):
            return (num_terms + call.positions) * rows * columns
        return call.positions * num_terms * (rows + columns)

    def _kept_values(self, call: BlockCall, num_terms: int) -> int:
        """U diag(omega), and what lies between the two products or, where the input needs it, the rebuilt weight."""
        rows, columns = self.block.shape
        if issubclass(self.layer, SpectralShardedRecurrent):
            return num_terms * rows
        if self._is_rebuilt(call, num_terms):
            needs_weight = call.input_needs_grad or issubclass(self.layer, SpectralShardedConv)  # torch keeps it anyway
            return num_terms * rows + rows * columns * needs_weight
        # the groups' factors v are joined into one kernel, which is a new tensor
        joined = num_terms * columns if issubclass(self.layer, SpectralShardedGroupedConv) else 0
        return num_terms * (rows + call.positions) + joined

    def _is_rebuilt(self, call: BlockCall, num_terms: int) -> bool:
        if issubclass(self.layer, SpectralShardedGroupedConv):
            return False
        return rebuilding_is_cheaper(call.positions, num_terms, *self.block.shape)
