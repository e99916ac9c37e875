"""What the engine itself does to all that travels in a round: what it knows of clients, what it can add, and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_spectral.algorithms.filter import Arrival, Filter, Fit, Opened, ServerEnd, Unusable
from lightning_spectral.filters.limits import Limits
from lightning_spectral.protocol.client_store import ClientStore, note_state, with_state
from lightning_spectral.protocol.exchange import digest, update_norm
from lightning_spectral.protocol.records import ClientOutcome, Download, Key, Tensors, WorkUnit
from lightning_spectral.sums.exact_mean import Peers, can_be_summed

NORM = "update_norm"  # a figure of arrivals
STATES, STORED, FROZEN = "client states", "stored clients", "frozen tensors"  # names of ends whose state lasts


def chain(filters: Sequence[Filter], fit: Fit, store: ClientStore, keeps_state: bool) -> dict[str, ServerEnd]:
    """All that acts on updates at the server, by name, the end next to the algorithm first.

    What needs new values acts next to the algorithm; what the engine checks of values comes right after they are
    unpacked, and what it knows of clients is next to the network. The algorithm keeps in ``store`` what it keeps of
    single clients; ``keeps_state`` says whether devices keep something from turn to turn.
    """
    made, rules = [(each.name, each.server(fit)) for each in filters], fit.half.rules
    place = next((index for index, each in enumerate(filters) if each.gives is not None), len(made))
    ends: dict[str, ServerEnd | None] = {
        **dict(made[:place]),
        "norms": Norms(fit.figure == "stale update") if "update" in fit.figure else None,
        "finite values": Finite(),
        "limits": Limits(rules, fit.half.server) if rules.limits else None,
        **dict(made[place:]),
        STATES: DeviceStates() if keeps_state else None,
        STORED: Stored(store, "store_bytes"),
        FROZEN: FrozenBase(fit.half.frozen_tensors),
    }
    return {name: end for name, end in ends.items() if end is not None}


class FrozenBase(ServerEnd):
    """Sends tensors that do not change once to each client.

    A client counts as having what it was sent once one of its updates has come back, and no more once its device has
    said that it lost some of it. A tensor whose value at the server changes between rounds, e.g. in a callback, is sent
    to all clients once more. Values are compared by digests, which take a second or two per gigabyte in each round.
    """

    def __init__(self, frozen: Callable[[], Tensors]) -> None:
        self._frozen = frozen
        self.digests: dict[str, str] = {}  # of the values of frozen tensors, by name, when the last round opened
        self._version = 0  # counts the changes of any of them
        self._since: dict[str, int] = {}  # for each parameter, the version in which it got its value
        self._num_bytes: dict[str, int] = {}
        self._holders: dict[Key, int] = {}  # for each client, the version that it has
        self._noted: dict[Key, int] = {}
        self._names: frozenset[str] | None = None

    def begin(self, opened: Opened) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Note which frozen tensors have changed since the last round opened; `ValueError` if their names have."""
        frozen = self._frozen()
        self._names = frozenset(frozen) if self._names is None else self._names
        if others := sorted(self._names ^ frozen.keys()):
            raise ValueError(
                f"`requires_grad` of {', '.join(others)} changed during the fit; which parameters are trained "
                "is fixed in its first round. Freeze or unfreeze between two fits: call `Trainer.fit` again, with a "
                "new Trainer and without `ckpt_path`."
            )
        digests = {name: digest(tensor) for name, tensor in frozen.items()}
        changed = {name for name in digests if digests[name] != self.digests.get(name)}
        self._version += bool(changed)
        self._since = {name: self._version if name in changed else self._since[name] for name in digests}
        self._num_bytes = {name: tensor.numel() * tensor.element_size() for name, tensor in frozen.items()}
        self.digests = digests

    def send(self, download: Download) -> Download:
        """Say in a download which of its tensors are frozen, and which of these its client already has."""
        if not self.digests:
            return download
        frozen = {name: value for name, value in self.digests.items() if name in download.tensors}
        return replace(download, frozen=frozen, held=self.held_by(download.unit).intersection(download.tensors))

    def held_by(self, unit: WorkUnit) -> frozenset[str]:
        """Names of the frozen tensors whose value a client already has."""
        version = self._noted.get(unit.key, self._holders.get(unit.key, -1))
        return frozenset(name for name, since in self._since.items() if since <= version)

    def saved_bytes(self, unit: WorkUnit) -> int:
        return sum(self._num_bytes[name] for name in self.held_by(unit))

    def received(self, units: Iterable[WorkUnit]) -> None:
        """Note that some clients now have all frozen tensors."""
        self._noted.update({unit.key: self._version for unit in units if self.digests})

    def note(self, outcomes: Sequence[ClientOutcome]) -> None:
        self._noted.update({outcome.unit.key: -1 for outcome in outcomes if outcome.missing})
        reported = (None, "not_finite", "no_update")  # it sent back an update, usable or not
        self.received(outcome.unit for outcome in outcomes if outcome.left_out in reported)

    def close(self, outcomes: Sequence[ClientOutcome]) -> Mapping[str, float]:
        self._holders.update(self._noted)
        self._noted = {}
        return {}

    def state_dict(self) -> dict[str, Any]:
        known = {"digests": dict(self.digests), "since": dict(self._since), "holders": dict(self._holders)}
        return {"version": self._version, **known} if self.digests else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._version, self._holders = state_dict["version"], dict(state_dict["holders"])
        self.digests, self._since = dict(state_dict["digests"]), dict(state_dict["since"])


class Stored(ServerEnd):
    """Keeps what is written of single clients in a round once the round ends."""

    def __init__(self, store: ClientStore | None = None, figure: str = "") -> None:
        self.store, self._figure = ClientStore() if store is None else store, figure

    def begin(self, opened: Opened) -> None:
        self.store.discard()

    def gather(self, processes: Peers) -> Iterable[Arrival]:
        for entries in processes.gather(self.store.written() if processes.size > 1 else {}):  # among them its own
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
        self._round_idx = opened.cohort.round_idx

    def send(self, download: Download) -> Download:
        return with_state(download, self.store)

    def added(self, arrival: Arrival) -> None:
        note_state(arrival.upload, self._round_idx, self.store)


class Finite(ServerEnd):
    """Leaves out updates that are not finite, or too large for an exact sum."""

    def arrive(self, arrival: Arrival) -> Arrival:
        magnitudes = arrival.upload.largest.values()
        if not all(map(can_be_summed, magnitudes)):
            too_large = all(map(math.isfinite, magnitudes))
            raise Unusable("not_finite", f"it holds values up to {max(magnitudes):.0e}" if too_large else "")
        return arrival


@dataclass(eq=False)
class Norms(ServerEnd):
    """Takes the norms of updates, for a sampler."""

    is_relative: bool  # to what the server expects of each client

    def begin(self, opened: Opened) -> None:
        self._round = opened.round

    def arrive(self, arrival: Arrival) -> Arrival:
        expected = self._round.expected_update(arrival.receipt.unit) if self.is_relative else None
        norm = update_norm(arrival.sent.tensors, arrival.upload.tensors, expected)
        return replace(arrival, figures={**arrival.figures, NORM: norm})
