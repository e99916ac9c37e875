"""What travels between the parts of a round, field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from lightning_spectral.client.batches import ClientData
from lightning_spectral.protocol.exclusion import Reason
from lightning_spectral.protocol.magnitudes import can_be_summed, largest_magnitudes
from lightning_spectral.server.processes import Processes

Tensors = Mapping[str, Tensor]


class ClientTask(NamedTuple):
    """One client's turn in one round: what Lightning sees as a batch.

    A named tuple, because Lightning rebuilds dataclasses that travel as batches and cannot rebuild frozen ones.

    Attributes:
        round_idx: Communication round, from 0.
        client_id: Which client, from 0.
        num_examples: Number of the client's training examples; its weight in every average.
        data: Where its batches come from.
    """

    round_idx: int
    client_id: int
    num_examples: int
    data: ClientData


class IdleTask(NamedTuple):
    """A turn in which one of several processes waits for the others.

    Attributes:
        round_idx: Communication round, from 0.
    """

    round_idx: int


@dataclass(frozen=True)
class Cohort:
    """Who takes part in one round.

    Attributes:
        seed: The run's seed.
        round_idx: Communication round, from 0.
        groups: For each distinct keep ratio, the ids of its clients, ascending.
        num_examples: Number of training examples of each client, by id.
        processes: Who trains them, and shares what is costly to prepare.
    """

    seed: int
    round_idx: int
    groups: Mapping[float, tuple[int, ...]]
    num_examples: Mapping[int, int]
    processes: Processes = field(default_factory=Processes)

    @property
    def total_weight(self) -> int:
        """Number of training examples of all clients together."""
        return sum(self.num_examples.values())

    def effective_size(self, client_ids: Sequence[int]) -> float:
        r"""Kish's number of equally weighted clients that average as well, :math:`1/\sum_c a_c^2` with a = D / sum D.

        Example:
            >>> Cohort(0, 0, {}, {1: 30, 2: 10}).effective_size([1, 2])
            1.6
        """
        sizes = [self.num_examples[client_id] for client_id in client_ids]
        if not any(sizes):
            return float(len(sizes))  # nobody has data: nobody counts more than another
        return sum(sizes) ** 2 / sum(size**2 for size in sizes)


@dataclass(frozen=True)
class Download:
    """What the server sends to one client.

    Attributes:
        keep_ratio: The client's capacity, which decides the sub-model it trains.
        tensors: Every parameter and buffer of the sub-model by name.
        terms: For each sharded layer, the sorted indices of the sent terms, shape ``(n,)``. The server's own note of
            what it drew: it does not travel.
    """

    keep_ratio: float
    tensors: Tensors
    terms: Tensors = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that travel down."""
        return num_bytes(self.tensors)


@dataclass(frozen=True)
class Upload:
    """What one client sends back.

    Attributes:
        tensors: The trained parameters and the floating-point buffers, by the names under which they went down.
            They are the sub-model's own tensors, to be read before the next client is loaded.
        num_examples: The client's weight in the average.
    """

    tensors: Tensors
    num_examples: int

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that travel up."""
        return num_bytes(self.tensors)

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """Largest absolute value of each tensor, NaN if it holds one; one host read for all tensors."""
        return largest_magnitudes(self.tensors)

    def can_be_averaged(self) -> bool:
        """Whether every value is finite, and small enough for an exact sum."""
        return all(can_be_summed(magnitude) for magnitude in self.largest.values())


@dataclass(frozen=True)
class ClientOutcome:
    """What a client's turn came to.

    Attributes:
        round_idx: Communication round, from 0.
        client_id: Which client.
        keep_ratio: Share of singular terms it held.
        num_examples: Its weight in the average.
        num_steps: Local optimizer steps taken.
        loss: Mean training loss per example over its local epochs; NaN if it took no step.
        downlink_bytes: Bytes sent to it.
        uplink_bytes: Bytes it sent back.
        left_out: Why it is not in the average; ``None`` if it is.
        virtual_seconds: When it was done, by the virtual clock; NaN without a clock, or if it never was.
        logged: Means of what the client's own ``self.log`` calls said; nothing if it is left out.
    """

    round_idx: int
    client_id: int
    keep_ratio: float
    num_examples: int
    num_steps: int
    loss: float
    downlink_bytes: int
    uplink_bytes: int
    left_out: Reason | None = None
    virtual_seconds: float = math.nan
    logged: Mapping[str, LoggedValue] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundSummary:
    """What a finished round came to.

    Attributes:
        round_idx: Communication round, from 0.
        clients: One outcome per client, in the cohort's order.
        seconds: Wall-clock seconds per stage: refresh, sample, load, train, aggregate, apply; of several processes the
            longest.
        diagnostics: The algorithm's own figures, e.g. the share of terms that were visited.
        logged: What the clients' own ``self.log`` calls came to: example-weighted means over the round.
        left_out: For each reason for which this run may leave clients out, for how many it did.
    """

    round_idx: int
    clients: tuple[ClientOutcome, ...]
    seconds: Mapping[str, float]
    diagnostics: Mapping[str, float]
    logged: Mapping[str, LoggedValue]
    left_out: Mapping[Reason, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoggedValue:
    """One value that a client logged, or all clients of a round.

    Attributes:
        value: The example-weighted mean.
        prog_bar: Whether the user's call asked for the progress bar.
        logger: Whether the user's call asked for the loggers.
    """

    value: float
    prog_bar: bool
    logger: bool


def num_bytes(tensors: Tensors) -> int:
    """Bytes of the values of some named tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
