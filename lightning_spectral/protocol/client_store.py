"""What the server keeps of its clients, in a few large tensors: two small ones per client would take 1.5 kB more."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_spectral.protocol.records import Download, Key, Tensors, Upload, WorkUnit, num_bytes

MOST_BYTES = 2**20  # of a chunk, if more than one entry fits; a checkpoint copies the last chunk of each table
Layout = tuple[tuple[str, torch.dtype, tuple[int, ...], tuple[int, ...]], ...]
LAST_TURN = "last turn"  # beside the tensors of a client's state: the round in which its device kept them


class _Table:
    """The entries of one model that have one layout, a row each, in chunks that stay where they are.

    Attributes:
        layout: Name, type, shape and strides of an entry's tensors. Strides, because the last bit of a product of
            matrices may depend on them.
        row_bytes: Size of an entry.
        rows: Row of each client that has an entry.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.row_bytes = sum(prod(shape) * dtype.itemsize for _, dtype, shape, _ in layout)
        self.rows: dict[int, int] = {}
        self._clients = array("q")  # of each row
        self._chunks: list[dict[str, Tensor]] = []
        self._bounds = [0]  # first row of each chunk, and the number of rows of all

    def read(self, client_id: int) -> dict[str, Tensor]:
        """A client's tensors: views."""
        row = self.rows[client_id]
        chunk = bisect_right(self._bounds, row) - 1
        return {name: tensor[row - self._bounds[chunk]] for name, tensor in self._chunks[chunk].items()}

    def write(self, client_id: int, tensors: Tensors) -> None:
        """Replace a client's entry, or add one."""
        if client_id not in self.rows:
            self.rows[client_id] = len(self._clients)
            self._clients.append(client_id)
            if len(self._clients) > (room := self._bounds[-1]):
                count = min(max(room, 1), max(MOST_BYTES // max(self.row_bytes, 1), 1))
                self._chunks.append({})
                for name, dtype, shape, strides in self.layout:
                    rows = (count, *shape), (prod(shape), *strides)
                    self._chunks[-1][name] = torch.empty_strided(*rows, dtype=dtype)
                self._bounds.append(room + count)
        for name, kept in self.read(client_id).items():
            kept.copy_(tensors[name])

    def remove(self, client_id: int) -> None:
        """Remove an entry; the last one takes its row."""
        last = self._clients[-1]
        if last != client_id:
            moved, self._clients[self.rows[client_id]] = self.read(last), last
            self.rows[last] = self.rows[client_id]
            for name, kept in self.read(last).items():
                kept.copy_(moved[name])
        del self.rows[client_id], self._clients[-1]

    def chunks(self) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """The clients of each chunk, and their entries as one tensor for each name, with nothing else in its memory."""
        for (start, end), chunk in zip(pairwise(self._bounds), self._chunks, strict=True):
            if clients := self._clients[start:end].tolist():
                is_full, count = len(clients) == end - start, len(clients)
                yield clients, {name: t if is_full else t[:count].clone() for name, t in chunk.items()}


class ClientStore:
    """Named tensors for each client and model: stale updates, last losses, what simulated devices keep.

    It is empty until an algorithm writes to it. Everything is kept on the CPU, since a thousand clients would fill a
    GPU, and is read on the device that `to` names. What is written during a round can be read immediately, but is
    committed only when the round ends: a checkpoint within the round does not contain it, and a failed round discards
    it. Each of several processes writes for the clients that it trained; `written` and `merge` give all of them the
    same content at the end of a round. What is read stays the same until the round ends.

    Example:
        >>> import torch
        >>> store, unit = ClientStore(), WorkUnit(3)
        >>> store[unit] = {"loss": torch.zeros(2)}
        >>> unit in store, store.num_bytes, store.state_dict()
        (True, 8, [])
        >>> store.commit()
        >>> store.state_dict()
        [{'model': '', 'clients': tensor([3]), 'tensors': {'loss': tensor([[0., 0.]])}}]
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[str, Layout], _Table] = {}
        self._written: dict[Key, dict[str, Tensor]] = {}
        self._device = torch.device("cpu")

    def __getitem__(self, unit: WorkUnit) -> Tensors:
        return {name: tensor.to(self._device) for name, tensor in self.kept(unit).items()}

    def __setitem__(self, unit: WorkUnit, tensors: Tensors) -> None:
        """Store copies of some tensors, in place of the previous ones."""
        self._written[unit.key] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.key in self._written or self._table(unit.key) is not None

    def __len__(self) -> int:
        new = sum(self._table(key) is None for key in self._written)
        return new + sum(len(table.rows) for table in self._tables.values())

    def __iter__(self) -> Iterator[Key]:
        committed = {(client, model) for (model, _), table in self._tables.items() for client in table.rows}
        return iter(sorted(committed | self._written.keys()))

    def _table(self, key: Key) -> _Table | None:
        """The table that has a key's committed entry, if there is one."""
        client_id, model = key
        return next((t for (own, _), t in self._tables.items() if own == model and client_id in t.rows), None)

    def kept(self, unit: WorkUnit) -> Tensors:
        """A unit's tensors where they are kept, on the CPU."""
        if unit.key in self._written:
            return self._written[unit.key]
        if (table := self._table(unit.key)) is None:
            raise KeyError(unit.key)
        return table.read(unit.client_id)

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, in bytes."""
        committed = sum(table.row_bytes * len(table.rows) for table in self._tables.values())
        return committed + sum(map(num_bytes, self._written.values()))

    def written(self) -> dict[Key, dict[str, Tensor]]:
        """The entries written in this round so far, for other processes."""
        return {key: dict(entry) for key, entry in self._written.items()}

    def merge(self, written: Mapping[Key, Tensors]) -> None:
        """Add the entries that another process wrote in this round."""
        self._written.update({key: dict(tensors) for key, tensors in written.items()})

    def commit(self) -> None:
        """Keep the entries written in a round that has ended."""
        for key in sorted(self._written):  # so that tables are the same whichever process wrote what
            self._keep(key, self._written[key])
        self._written = {}

    def _keep(self, key: Key, tensors: Tensors) -> None:
        (client_id, model), before = key, self._table(key)
        layout = tuple((name, t.dtype, tuple(t.shape), t.stride()) for name, t in tensors.items())
        if before is not None and before.layout != layout:
            before.remove(client_id)
        if (model, layout) not in self._tables:
            self._tables[model, layout] = _Table(layout)
        self._tables[model, layout].write(client_id, tensors)

    def discard(self) -> None:
        """Drop the entries written in a round that did not end."""
        self._written = {}

    def to(self, device: torch.device | str) -> None:
        """Read everything on a device from now on."""
        self._device = torch.device(device)

    def state_dict(self) -> list[dict[str, Any]]:
        """The entries of all finished rounds, for the checkpoint: many clients of one model in each item.

        The tensors of an item have a row for each client.
        """
        return [
            {"model": key[0], "clients": torch.tensor(clients), "tensors": tensors}
            for key in sorted(self._tables, key=str)
            for clients, tensors in self._tables[key].chunks()
        ]

    def load_state_dict(self, state_dict: Iterable[Mapping[str, Any]]) -> None:
        self._tables, self._written = {}, {}
        for saved in state_dict:
            for row, client_id in enumerate(saved["clients"].tolist()):
                self._keep((client_id, saved["model"]), {name: t[row].cpu() for name, t in saved["tensors"].items()})


def note_state(upload: Upload, round_idx: int, states: ClientStore) -> None:
    """Note that a client's device has kept a state in a round; in a simulation, also that state.

    Example:
        >>> states, upload = ClientStore(), Upload(WorkUnit(3), {}, client_state={"head": torch.ones(1)})
        >>> note_state(upload, 7, states)
        >>> found = with_state(Download(WorkUnit(3), 1.0, {}), states)
        >>> found.last_turn, found.client_state
        (7, {'head': tensor([1.])})
    """
    states[upload.unit] = {**upload.client_state, LAST_TURN: torch.tensor(round_idx)}


def with_state(download: Download, states: ClientStore) -> Download:
    """A download with the state of its client's last turn, as far as it is known here."""
    if download.unit not in states:
        return download
    last_turn = int(states.kept(download.unit)[LAST_TURN])
    state = {name: tensor for name, tensor in states[download.unit].items() if name != LAST_TURN}
    return replace(download, last_turn=last_turn, client_state=state)
