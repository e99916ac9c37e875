"""The server's record of which clients have which frozen tensors, so that these are sent to each of them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_spectral.algorithms.filter import Opened, ServerEnd
from lightning_spectral.protocol.frozen_base import digest
from lightning_spectral.protocol.records import ClientOutcome, Download, Key, Tensors, WorkUnit


class FrozenBase(ServerEnd):
    """Sends tensors that do not change once to each client.

    It is a record of the frozen tensors that each client has. A client counts as having what it was sent once one of
    its updates has come back. Until then everything is sent again, and likewise after its device has said that it lost
    some of it. If the server's value of a frozen tensor changes between rounds, e.g. in a callback, it is sent to all
    clients once more. Values are compared by digests, which also detect writes through ``.data`` and take a second or
    two per gigabyte in each round.

    Holders noted during a round count immediately, but are committed only when the round ends, as in a `ClientStore`.

    Args:
        frozen: Returns the frozen tensors by name, as they are now.

    Attributes:
        digests: For each frozen tensor, by name, a digest of its value when the last round opened.

    Example:
        >>> from torch import nn
        >>> from lightning_spectral.protocol.frozen_base import frozen_parameters
        >>> net, client = nn.Linear(2, 2).requires_grad_(False), WorkUnit(3)
        >>> base = FrozenBase(lambda: frozen_parameters(net))
        >>> base.refresh()
        >>> base.received([client])
        >>> sorted(base.held_by(client))
        ['bias', 'weight']
        >>> net.weight.data.zero_()
        tensor([[0., 0.],
                [0., 0.]])
        >>> base.refresh()
        >>> sorted(base.held_by(client))
        ['bias']
    """

    def __init__(self, frozen: Callable[[], Tensors]) -> None:
        self._frozen = frozen
        self.digests: dict[str, str] = {}
        self._version = 0  # counts the changes of any of them
        self._since: dict[str, int] = {}  # for each parameter, the version in which it got its value
        self._num_bytes: dict[str, int] = {}
        self._holders: dict[Key, int] = {}  # for each client, the version that it has
        self._noted: dict[Key, int] = {}
        self._names: frozenset[str] | None = None

    def begin(self, opened: Opened) -> None:
        self.refresh()

    def refresh(self) -> None:
        """Compare the frozen tensors with their values when the last round opened.

        Raises:
            ValueError: If they are not those of the first round of the fit.
        """
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
        if not self.digests:
            return {}
        known = {"digests": dict(self.digests), "since": dict(self._since)}
        return {"version": self._version, "holders": dict(self._holders), **known}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._version, self._holders = state_dict["version"], dict(state_dict["holders"])
        self.digests, self._since = dict(state_dict["digests"]), dict(state_dict["since"])
