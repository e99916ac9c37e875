"""The server half of Zampling: it sends probabilities, and counts the bits that come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.zampling.checks import hardly_moved
from lightning_spectral.algorithms.zampling.device import BITS, MOVED, PLACE, PROBS, ZamplingSide
from lightning_spectral.algorithms.zampling.state import ZamplingState, on_grid
from lightning_spectral.functional.zampling import BYTES_PER_ENTRY, bit_entropy, pack_levels, unpack_bits
from lightning_spectral.nn.cost import Cost
from lightning_spectral.protocol.buffer_rules import NO_RULES, BufferRules
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    load_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums import MeanBits, RunningMean


class ZamplingHalf(ServerHalf):
    """Zampling bound to a module. In one process the device half shares the rows of Q with the state."""

    state: ZamplingState

    def __init__(
        self,
        server: nn.Module,
        state: ZamplingState,
        side: ZamplingSide,
        *,
        smoothing: float = 0.0,
        coordinated: bool = False,
        buffers: BufferRules = NO_RULES,
    ) -> None:
        super().__init__(server, state, buffers)
        self.side = side
        self.smoothing = smoothing
        self.coordinated = coordinated
        self.compressed = frozenset(weight.name for weight in state.weights)

    @property
    def device_half(self) -> ZamplingSide:
        return self.side

    @property
    def cost_besides(self) -> Cost:
        """The products Qz and Q^T g of a local step, and all of Q; an accelerator keeps its transpose as well."""
        entries = self.state.matrix.num_rows * (self.state.matrix.degree or 1)
        return Cost(step_macs=2 * entries, held_bytes=BYTES_PER_ENTRY * entries)

    def initialize(self, workers: SharesWork) -> str:
        return (
            f"Zampling: {self.state.matrix.num_rows:,} weights in {len(self.state.weights)} tensors become random "
            f"combinations of {len(self.state.probs):,} bits; the values they had, trained or not, are not used."
        )

    def open(self, cohort: Cohort) -> ZamplingRound:
        return ZamplingRound(self, cohort)

    def settle(self) -> None:
        """Bring probabilities back into [0, 1], which a server optimizer may have left, and write Qp."""
        self.state.settle()
        load_tensors(self.server, self.state.network())

    def advice(self, moment: Moment, summary: RoundSummary | None = None) -> Sequence[str]:
        moved = summary.logged.get(MOVED) if summary and moment is Moment.AFTER_TRAINING else None
        return hardly_moved(moved.value, len(summary.averaged)) if summary and moved else ()


class ZamplingRound(Round):
    """One open round.

    Attributes:
        tensors: What every client is sent: probabilities and dense tensors, by name.
        probs: The probabilities as they arrive at clients, after rounding, shape ``(n,)``.
        bits: Running mean of the clients' bits.
        dense: Running mean of the changes of dense tensors.
    """

    def __init__(self, half: ZamplingHalf, cohort: Cohort) -> None:
        self.half, self.cohort = half, cohort
        sent = self.probs = half.state.probs.detach()
        if half.side.downlink_bits is not None:
            generator = derived_generator(cohort.seed, "downlink rounding", cohort.round_idx)
            sent = pack_levels(sent, half.side.downlink_bits, generator)
            self.probs = half.side.received(sent).to(self.probs)
        self.tensors = {PROBS: sent, **travelling_tensors(half.server, half.compressed)}
        num_clients = sum(map(len, cohort.groups.values()))
        self.bits = MeanBits(len(self.probs), num_clients, self.probs.device)
        self.dense = dense_mean(half.server, averaged_tensors(half.server, half.compressed, half.buffers), cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        place = {PLACE: torch.tensor(self.cohort.place_of(unit), dtype=torch.int32)} if self.half.coordinated else {}
        return Download(unit, 1.0, {**self.tensors, **place}), Receipt(unit, 1.0)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        """Add a client's bits, which count the same for each client, and its dense tensors."""
        self.bits.add(unpack_bits(upload.tensors[BITS], len(self.probs)), 1.0)
        self.dense.add(upload.tensors, receipt.unit.coefficient, upload.largest)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.bits, self.dense]

    def close(self) -> None:
        """Set the pseudo-gradients: with learning rate 1 the new probabilities are exactly the mean of the bits."""
        probs = self.half.state.probs
        probs.grad = probs.detach() - on_grid(self.bits.finish(self.half.smoothing)).to(probs)
        apply_mean_change(self.half.server, self.dense.finish())

    def metrics(self) -> Mapping[str, float]:
        """Entropy of the mean of the bits, share on which all agree, how far two clients differ, share of p settled."""
        count = self.bits.weights.num_terms
        if count == 0:
            return {}
        mean = self.bits.finish()
        pairs = 2 * mean * (1 - mean) * (count / (count - 1) if count > 1 else 1.0)
        return {
            "bit_entropy": float(bit_entropy(mean).mean()),
            "bits_agreed": float(((mean == 0) | (mean == 1)).double().mean()),
            "bit_disagreement": float(pairs.mean()),
            "probs_settled": float(((self.probs <= 0) | (self.probs >= 1)).double().mean()),
        }
