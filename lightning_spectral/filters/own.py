"""What the engine itself does to all that travels in a round: what it knows of clients, what it can add, and norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Opened, ServerEnd, Unusable
from lightning_spectral.filters.frozen_base import FrozenBase
from lightning_spectral.filters.limits import Limits
from lightning_spectral.participation import Figure
from lightning_spectral.protocol.client_store import ClientStore, note_state, with_state
from lightning_spectral.protocol.exchange import wide
from lightning_spectral.protocol.records import ClientOutcome, Download, Tensors
from lightning_spectral.sums.exact_mean import Peers

NORM = "update_norm"  # a figure of arrivals
STATES, STORED, FROZEN = "client states", "stored clients", "frozen tensors"  # names of ends whose state lasts


def chain(filters: Sequence[Filter], fit: Fit, store: ClientStore, keeps_state: bool) -> dict[str, ServerEnd]:
    """All that acts on updates at the server, by name, the end next to the algorithm first.

    What needs new values acts next to the algorithm; what the engine checks of values comes right after they are
    unpacked, and what it knows of clients is next to the network.

    Args:
        filters: The user's, which go together.
        fit: What they may know.
        store: What the algorithm keeps of single clients.
        keeps_state: Whether devices keep something from turn to turn.
    """
    made = {each.name: each.server(fit) for each in filters}
    packing = next((each.name for each in filters if each.gives is not None), None)
    place = len(made) if packing is None else list(made).index(packing)
    names, rules = list(made), fit.half.rules
    own: dict[str, ServerEnd | None] = {
        "norms": Norms(fit.figure) if "update" in fit.figure else None,
        "finite values": Finite(),
        "limits": Limits(rules, fit.half.server) if rules.limits else None,
    }
    known: dict[str, ServerEnd | None] = {
        STATES: DeviceStates() if keeps_state else None,
        STORED: Stored(store, "store_bytes"),
        FROZEN: FrozenBase(fit.half.frozen_tensors),
    }
    inner, outer = ({name: made[name] for name in part} for part in (names[:place], names[place:]))
    return {name: end for name, end in {**inner, **own, **outer, **known}.items() if end is not None}


class Stored(ServerEnd):
    """Keeps what is written of single clients in a round once the round ends."""

    def __init__(self, store: ClientStore | None = None, figure: str = "") -> None:
        self.store, self._figure = ClientStore() if store is None else store, figure

    def begin(self, opened: Opened) -> None:
        self.store.discard()

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        written = processes.gather(self.store.written() if processes.size > 1 else {})
        for entries in written:  # among them its own
            self.store.merge(entries)
        return ()

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        self.store.commit()
        return {self._figure: float(self.store.num_bytes)} if self._figure and len(self.store) else {}

    def state_dict(self) -> dict[str, Any]:
        return {"entries": entries} if (entries := self.store.state_dict()) else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.store.load_state_dict(state_dict.get("entries", ()))


class DeviceStates(Stored):
    """Sends along, in a simulation, what devices keep for their clients from turn to turn."""

    def begin(self, opened: Opened) -> None:
        super().begin(opened)
        self._round_idx = opened.round_idx

    def send(self, download: Download) -> Download:
        return with_state(download, self.store)

    def added(self, arrival: Arrival) -> None:
        note_state(arrival.upload, self._round_idx, self.store)


class Finite(ServerEnd):
    """Leaves out updates that are not finite, or too large for an exact sum."""

    def arrive(self, arrival: Arrival) -> Arrival:
        if not arrival.upload.can_be_averaged():
            magnitudes = arrival.upload.largest.values()
            too_large = all(map(math.isfinite, magnitudes))
            raise Unusable("not_finite", f"it holds values up to {max(magnitudes):.0e}" if too_large else "")
        return arrival


class Norms(ServerEnd):
    """Takes the norms of updates, for a sampler."""

    def __init__(self, figure: Figure) -> None:
        self._is_relative = figure == "stale update"

    def begin(self, opened: Opened) -> None:
        self._round = opened.round

    def arrive(self, arrival: Arrival) -> Arrival:
        expected = self._round.expected_update(arrival.receipt.unit) if self._is_relative else None
        norm = update_norm(arrival.sent.tensors, arrival.upload.tensors, expected)
        return replace(arrival, figures={**arrival.figures, NORM: norm})


@torch.no_grad()
def update_norm(sent: Tensors, returned: Tensors, expected: Tensors | None = None) -> float:
    """Euclidean norm of what came back minus what was sent, over the tensors that were sent both ways.

    Args:
        sent: The tensors that a device was sent, by name.
        returned: The tensors that it sent back.
        expected: The change that the server expects, which is subtracted; ``None`` for none. Tensors without an entry
            are expected to stay unchanged.

    Returns:
        The norm, in units of the weights.

    Example:
        >>> sent, returned = {"w": torch.zeros(2), "steps": torch.tensor(3)}, {"w": torch.tensor([3.0, 4.0])}
        >>> update_norm(sent, returned), update_norm(sent, returned, expected={"w": torch.tensor([3.0, 0.0])})
        (5.0, 4.0)
    """
    return norm_of(
        wide(returned[name]) - wide(before) - (expected or {}).get(name, 0.0)
        for name, before in both_ways(sent, returned)
    )


def norm_of(tensors: Iterable[torch.Tensor]) -> float:
    """Euclidean norm of all values together."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def both_ways(sent: Tensors, returned: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the tensors sent that came back in the same shape, and that can be changed in part."""
    for name, before in sent.items():
        if name in returned and before.is_floating_point() and before.shape == returned[name].shape:
            yield name, before
