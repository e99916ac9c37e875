"""Bytes down and up, per client and round."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import lightning.pytorch as pl

from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.protocol.exclusion import ExclusionReason
from lightning_spectral.protocol.records import ClientOutcome, RoundSummary


class LedgerRow(NamedTuple):
    """The cost of one client's turn, and the reason if its update was not used.

    Attributes:
        round_idx: Communication round, from 0.
        client_id: The client, from 0.
        keep_ratio: Share of singular terms it held.
        downlink_bytes: Bytes sent to it.
        uplink_bytes: Bytes it sent back.
        left_out: Why it is not in the average; ``None`` if it is.
        virtual_seconds: When it finished, by the virtual clock; ``None`` without a clock, or if it never finished.
        model: Which model it trained; ``""`` if there is only one.
        measured: Whether it only measured something for a sampler before the round and sent back one number.
        frozen_bytes: Those of the bytes sent to it that are frozen parameters, which it did not have yet.
    """

    round_idx: int
    client_id: int
    keep_ratio: float
    downlink_bytes: int
    uplink_bytes: int
    left_out: ExclusionReason | None = None
    virtual_seconds: float | None = None
    model: str = ""
    measured: bool = False
    frozen_bytes: int = 0


class CommunicationLedger(RoundCallback):
    """Counts the bytes of the tensors that are sent: their values, without the framing of any network protocol.

    It is part of the checkpoint. One row is kept per client and round, so this callback is not installed by default;
    the round's totals (``fl/bytes_down``, ``fl/bytes_up``) are always logged.

    Attributes:
        rows: One `LedgerRow` per client and round, in order.
    """

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []

    def on_round_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, summary: RoundSummary) -> None:
        self.rows.extend(_row(client)._replace(measured=True) for client in summary.measured)
        self.rows.extend(map(_row, summary.clients))

    @property
    def total_bytes(self) -> int:
        """All bytes of the run so far, in both directions."""
        return sum(row.downlink_bytes + row.uplink_bytes for row in self.rows)

    def bytes_per_client(self) -> dict[float, tuple[float, float]]:
        """For each keep ratio, the mean bytes (down, up) of a client's turn, without frozen parameters."""
        groups: dict[float, list[LedgerRow]] = defaultdict(list)
        for row in self.rows:
            if not row.measured:
                groups[row.keep_ratio].append(row)
        return {ratio: _mean_bytes(rows) for ratio, rows in sorted(groups.items())}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [tuple(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = [LedgerRow(*row) for row in state_dict["rows"]]


def _row(client: ClientOutcome) -> LedgerRow:
    seconds = None if math.isnan(client.virtual_seconds) else client.virtual_seconds
    turn = client.round_idx, client.client_id, client.keep_ratio
    sent = client.downlink_bytes, client.uplink_bytes
    return LedgerRow(*turn, *sent, client.left_out, seconds, client.unit.model, frozen_bytes=client.frozen_bytes)


def _mean_bytes(rows: list[LedgerRow]) -> tuple[float, float]:
    down = sum(row.downlink_bytes - row.frozen_bytes for row in rows)
    up = sum(row.uplink_bytes for row in rows)
    return down / len(rows), up / len(rows)
