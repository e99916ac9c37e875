"""The cost of Zampling to a client, as a function of the number of probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from lightning_spectral.functional.zampling.matrix import BYTES_PER_ENTRY
from lightning_spectral.nn.cost.block_costs import Cost
from lightning_spectral.nn.cost.costs import sent_whole
from lightning_spectral.nn.zampling.compressed import Compression
from lightning_spectral.protocol.exchange import kept_buffers

PROB_BYTES = 4  # of a probability that travels as a float


@dataclass(frozen=True)
class ZamplingCost:
    """The cost of a model with compressed weights to a client.

    Attributes:
        parameters: Number of values in its parameters: one score for each probability, and what is not compressed.
        macs: Multiply-accumulate operations of one forward pass.
        matrix_macs: Those of the products Qz and Q^T g of one local step, which do not depend on the batch.
        matrix_bytes: Bytes of Q in memory: an index and a value for each of its m d entries.
        downlink_bytes: Bytes sent to the client in a round.
        uplink_bytes: Bytes it sends back.
        frozen_bytes: Bytes of frozen parameters, which are sent to it once.
    """

    parameters: int
    macs: int
    matrix_macs: int
    matrix_bytes: int
    downlink_bytes: int
    uplink_bytes: int
    frozen_bytes: int = 0

    @property
    def round_bytes(self) -> int:
        """Bytes sent in a round, down and up, without those sent only once."""
        return self.downlink_bytes + self.uplink_bytes


@dataclass(frozen=True)
class ZamplingCosts:
    """The cost of a module to a client, at any number of probabilities.

    Attributes:
        full: The module as it is, trained and sent whole.
        dense: Parameters and bytes of what is not compressed.
        num_weights: Number m of compressed weights.
        degree: Number d of probabilities that each depends on.
        downlink_bits: Bits of a probability on its way down; ``None`` for a float.
    """

    full: ZamplingCost
    dense: Cost
    num_weights: int
    degree: int
    downlink_bits: int | None

    def at(self, num_probs: int) -> ZamplingCost:
        """The cost with n probabilities.

        Example:
            >>> costs = zampling_costs_of(nn.Linear(15, 10), Compression(1), downlink_bits=8)
            >>> costs.at(80).downlink_bytes, costs.at(80).uplink_bytes
            (80, 10)
        """
        entries, packed = self.num_weights * self.degree, -(-num_probs // 8)  # each binary digit is padded to bytes
        down = PROB_BYTES * num_probs if self.downlink_bits is None else self.downlink_bits * packed
        return ZamplingCost(
            parameters=num_probs + self.dense.parameters,
            macs=self.full.macs,
            matrix_macs=2 * entries,
            matrix_bytes=BYTES_PER_ENTRY * entries,
            downlink_bytes=down + self.dense.downlink_bytes,
            uplink_bytes=packed + self.dense.uplink_bytes,
            frozen_bytes=self.dense.frozen_bytes,
        )


def zampling_costs_of(
    module: nn.Module,
    how: Compression,
    *,
    downlink_bits: int | None = None,
    keep_buffers: Sequence[str] = (),
    macs: int = 0,
) -> ZamplingCosts:
    """The cost of a module at any number of probabilities; the factor of the compression has no effect."""
    weights = how.weights_of(module)
    whole = sent_whole(module, (), kept_buffers(module, keep_buffers))
    return ZamplingCosts(
        ZamplingCost(whole.parameters, macs, 0, 0, whole.downlink_bytes, whole.uplink_bytes, whole.frozen_bytes),
        sent_whole(module, {weight.name for weight in weights}, kept_buffers(module, keep_buffers)),
        sum(weight.num_values for weight in weights),
        1 if how.degree is None else how.degree,
        downlink_bits,
    )
