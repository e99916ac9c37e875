"""The rounds and turns of a run as flat arrays, so that the checkpoint of a long run is small and quickly written."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.protocol.records import ClientOutcome, ExclusionReason


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

    @classmethod
    def of(cls, client: ClientOutcome, measured: bool) -> LedgerRow:
        """The row of one client's outcome."""
        seconds = None if math.isnan(client.virtual_seconds) else client.virtual_seconds
        turn = client.round_idx, client.client_id, client.keep_ratio
        sent = client.downlink_bytes, client.uplink_bytes
        return cls(*turn, *sent, client.left_out, seconds, client.unit.model, measured, client.frozen_bytes)


class PackedTurns(Mapping[int, list[LedgerRow]]):
    """The turns of each round, in 8 bytes each, or 16 with a virtual clock.

    Turns differ in their clients and times. All else takes few values together, which are kept once.

    Example:
        >>> turns, row = PackedTurns(), LedgerRow(3, client_id=7, keep_ratio=0.5, downlink_bytes=80, uplink_bytes=40)
        >>> turns.add([row])
        >>> turns[3] == [row], list(turns)
        (True, [3])
    """

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}  # first turn of each round, and the one after its last
        self._clients, self._seconds = array("i"), array("d")  # no times before there is one; NaN for none
        self._kinds: list[tuple[Any, ...]] = []
        self._index: dict[tuple[Any, ...], int] = {}  # of each kind
        self._kind_of = array("i")

    def __getitem__(self, round_idx: int) -> list[LedgerRow]:
        rows = []
        for turn in range(*self._spans[round_idx]):
            ratio, down, up, left_out, *rest = self._kinds[self._kind_of[turn]]
            seconds = self._seconds[turn] if self._seconds else math.nan
            at = None if math.isnan(seconds) else seconds
            rows.append(LedgerRow(round_idx, self._clients[turn], ratio, down, up, left_out, at, *rest))
        return rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._spans)

    def __len__(self) -> int:
        return len(self._spans)

    def add(self, rows: Iterable[LedgerRow]) -> None:
        """Add turns of a round, which may have some already; no later one has."""
        for row in rows:
            turn = len(self._clients)
            first, end = self._spans.get(row.round_idx, (turn, turn))
            assert end == turn, "turns are added round by round"
            self._spans[row.round_idx] = first, end + 1
            self._clients.append(row.client_id)
            kind = *row[2:6], *row[7:]
            if kind not in self._index:
                self._index[kind] = len(self._kinds)
                self._kinds.append(kind)
            self._kind_of.append(self._index[kind])
            if row.virtual_seconds is not None and not self._seconds:
                self._seconds.extend([math.nan] * turn)
            if row.virtual_seconds is not None or self._seconds:
                self._seconds.append(math.nan if row.virtual_seconds is None else row.virtual_seconds)

    def state_dict(self) -> dict[str, Any]:
        """A few tensors, and the list of what turns have in common."""
        counts = [end - first for first, end in self._spans.values()]
        columns: dict[str, array[Any]] = {"rounds": array("q", self._spans), "counts": array("i", counts)}
        columns |= {"clients": self._clients, "kind_of": self._kind_of, "seconds": self._seconds}
        return {"kinds": self._kinds[:], **{name: _tensor(column) for name, column in columns.items()}}

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> PackedTurns:
        """The turns that `state_dict` wrote."""
        turns, first = cls(), 0
        for round_idx, count in zip(state_dict["rounds"].tolist(), state_dict["counts"].tolist(), strict=True):
            turns._spans[round_idx] = first, first + count
            first += count
        turns._kinds = [*map(tuple, state_dict["kinds"])]
        turns._index = {kind: index for index, kind in enumerate(turns._kinds)}
        turns._clients, turns._kind_of = (array("i", state_dict[name].tolist()) for name in ("clients", "kind_of"))
        turns._seconds = array("d", state_dict["seconds"].tolist())
        return turns


class PackedRows:
    """Rows of named numbers, which are final; those with the same names share a list of them.

    Example:
        >>> rows = PackedRows()
        >>> rows.add([{"loss": 0.5}, {"loss": 0.25, "acc": 1.0}])
        >>> len(rows), rows.state_dict()["values"].tolist(), list(rows)[1]
        (2, [0.5, 0.25, 1.0], {'loss': 0.25, 'acc': 1.0})
    """

    def __init__(self) -> None:
        self._values = array("d")
        self._names: dict[tuple[str, ...], int] = {}
        self._names_of = array("i")

    def __len__(self) -> int:
        return len(self._names_of)

    def __iter__(self) -> Iterator[dict[str, float]]:
        first, of_kind = 0, list(self._names)
        for names in map(of_kind.__getitem__, self._names_of):
            yield dict(zip(names, self._values[first : first + len(names)], strict=True))
            first += len(names)

    def add(self, rows: Iterable[Mapping[str, float]]) -> None:
        """Add rows at the end."""
        for row in rows:
            self._names_of.append(self._names.setdefault(tuple(row), len(self._names)))
            self._values.extend(row.values())

    def state_dict(self) -> dict[str, Any]:
        """Two tensors, and the lists of names."""
        return {
            "names": list(self._names),
            "names_of": _tensor(self._names_of),
            "values": _tensor(self._values),
        }

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> PackedRows:
        """The rows that `state_dict` wrote."""
        rows = cls()
        rows._names = {tuple(names): index for index, names in enumerate(state_dict["names"])}
        rows._names_of, rows._values = array("i", state_dict["names_of"].tolist()), array("d")
        rows._values.extend(state_dict["values"].tolist())
        return rows


def _tensor(column: array[Any]) -> Tensor:
    return torch.from_numpy(np.array(column))
