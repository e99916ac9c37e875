"""The cost of n terms of one block of a weight to a client."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lightning_spectral.nn.layers.blocks import BlockCall, WeightBlock
from lightning_spectral.nn.layers.sharded import ShardedLayer


@dataclass(frozen=True)
class Cost:
    """The cost of a model, or of a part of one, to a client.

    Attributes:
        parameters: Number of values in its parameters, counting tied ones once, without the frozen multipliers.
        macs: Multiply-accumulate operations of one forward pass.
        kept_values: Values that one forward pass keeps for backward, beyond parameters, buffers and inputs.
        kept_bytes: The same in bytes.
        downlink_bytes: Bytes sent to the client in a round.
        uplink_bytes: Bytes it sends back.
        frozen_bytes: Bytes of frozen parameters, which are sent to it once.
    """

    parameters: int = 0
    macs: int = 0
    kept_values: int = 0
    kept_bytes: int = 0
    downlink_bytes: int = 0
    uplink_bytes: int = 0
    frozen_bytes: int = 0

    @property
    def round_bytes(self) -> int:
        """Bytes sent in a round, down and up, without those sent only once."""
        return self.downlink_bytes + self.uplink_bytes

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class BlockUse:
    """One block of a sharded weight, and every call that applies it in a pass.

    Attributes:
        block: The matrix.
        layer: The class of the sharded layer, which decides how the terms are applied.
        value_bytes: Bytes of one value.
        calls: The calls, in order.
    """

    block: WeightBlock
    layer: type[ShardedLayer]
    value_bytes: int
    calls: tuple[BlockCall, ...]

    def cost(self, num_terms: int) -> Cost:
        """The cost of n terms of the block, beyond what the layer costs with any number of terms."""
        factors = num_terms * sum(self.block.held_shape)
        used = [(self._used(call), call) for call in self.calls]
        kept = sum(self.layer.kept_by_terms(block, call, num_terms) for block, call in used if call.keeps)
        return Cost(
            parameters=factors,
            macs=sum(self.layer.macs_of_terms(block, call, num_terms) for block, call in used),
            kept_values=kept,
            kept_bytes=kept * self.value_bytes,
            downlink_bytes=(factors + num_terms) * self.value_bytes,  # with the multipliers
            uplink_bytes=factors * self.value_bytes,
        )

    def _used(self, call: BlockCall) -> WeightBlock:
        """The part of the matrix that a call multiplies."""
        rows, columns = self.block.held_shape
        return replace(self.block, shape=(rows, int(columns * call.input_share)))
