"""Frozen tensors, which are sent once: the server's record of who has them, and what a device keeps of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_spectral.protocol.buffer_rules import averaged_parameters
from lightning_spectral.protocol.records import ClientOutcome, Download, Key, Tensors, WorkUnit


class FrozenBase:
    """A record of the frozen tensors that each client of a model has, so that they need not be sent to it again.

    A client counts as having what it was sent once one of its updates has come back. Until then everything is sent
    again, and likewise after its device has said that it lost some of it. If the server's value of a frozen tensor
    changes between rounds, e.g. in a callback, it is sent to all clients once more. Values are compared by digests,
    which also detect writes through ``.data`` and take a second or two per gigabyte in each round.

    Holders noted during a round count immediately, but are committed only when the round ends, as in a `ClientStore`.

    Attributes:
        digests: For each frozen tensor, by name, a digest of its value when the last round opened.

    Example:
        >>> net, base, client = nn.Linear(2, 2).requires_grad_(False), FrozenBase(), WorkUnit(3)
        >>> base.refresh(frozen_parameters(net))
        >>> base.note([client])
        >>> sorted(base.held_by(client))
        ['bias', 'weight']
        >>> net.weight.data.zero_()
        tensor([[0., 0.],
                [0., 0.]])
        >>> base.refresh(frozen_parameters(net))
        >>> sorted(base.held_by(client))
        ['bias']
    """

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self._version = 0  # counts the changes of any of them
        self._since: dict[str, int] = {}  # for each parameter, the version in which it got its value
        self._num_bytes: dict[str, int] = {}
        self._holders: dict[Key, int] = {}  # for each client, the version that it has
        self._noted: dict[Key, int] = {}
        self._names: frozenset[str] | None = None

    def refresh(self, frozen: Tensors) -> None:
        """Compare the frozen tensors with their values when the last round opened.

        Args:
            frozen: Their values by name; the names are those of the first round of the fit.

        Raises:
            ValueError: If the frozen tensors are not those of the first round of the fit.
        """
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

    def mark(self, download: Download) -> Download:
        """Say in a download which of its tensors are frozen, and which of these its client already has."""
        frozen = {name: value for name, value in self.digests.items() if name in download.tensors}
        return replace(download, frozen=frozen, held=self.held_by(download.unit).intersection(download.tensors))

    def held_by(self, unit: WorkUnit) -> frozenset[str]:
        """Names of the frozen tensors whose value a client already has."""
        version = self._noted.get(unit.key, self._holders.get(unit.key, -1))
        return frozenset(name for name, since in self._since.items() if since <= version)

    def bytes_held_by(self, unit: WorkUnit) -> int:
        """Bytes that need not be sent to a client again."""
        return sum(self._num_bytes[name] for name in self.held_by(unit))

    def note(self, units: Iterable[WorkUnit]) -> None:
        """Note that some clients now have all frozen tensors."""
        self._noted.update({unit.key: self._version for unit in units if self.digests})

    def note_outcomes(self, outcomes: Collection[ClientOutcome]) -> None:
        """Note what is known of some clients after their turns."""
        self._noted.update({outcome.unit.key: -1 for outcome in outcomes if outcome.missing})
        reported = (None, "not_finite", "no_update")  # it sent back an update, usable or not
        self.note(outcome.unit for outcome in outcomes if outcome.left_out in reported)

    def commit(self) -> None:
        """Keep what was noted in a round that has ended."""
        self._holders.update(self._noted)
        self._noted = {}

    def state_dict(self) -> dict[str, Any]:
        """The record as of the last finished round, for the checkpoint; empty if nothing is frozen."""
        if not self.digests:
            return {}
        known = {"digests": dict(self.digests), "since": dict(self._since)}
        return {"version": self._version, "holders": dict(self._holders), **known}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the record that a checkpoint holds."""
        self._version, self._holders = state_dict["version"], dict(state_dict["holders"])
        self.digests, self._since = dict(state_dict["digests"]), dict(state_dict["since"])


@dataclass(eq=False)
class KeptTensors:
    """The frozen tensors of earlier downloads, by name, each with the digest it was sent with.

    In the server's own process, downloads are complete, and the tensors kept here are the server's own.
    """

    tensors: dict[str, tuple[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def missing(self, download: Download) -> tuple[str, ...]:
        """Names of the tensors that were not sent, and which are not here or have another value."""
        absent = sorted(download.held - download.tensors.keys())
        return tuple(name for name in absent if self.tensors.get(name, ("",))[0] != download.frozen.get(name))

    def complete(self, download: Download) -> Download:
        """Keep the frozen tensors that were sent, and add those that were not, of which none may be `missing`."""
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self.tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        kept = {name: self.tensors[name][1] for name in download.held - arrived.keys()}
        return replace(download, tensors={**download.tensors, **kept})


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that do not require a gradient and are not averaged, by name.

    Example:
        >>> sorted(frozen_parameters(nn.Linear(2, 2).requires_grad_(False)))
        ['bias', 'weight']
    """
    averaged = averaged_parameters(module)
    named = module.named_parameters()
    return {name: p.detach() for name, p in named if not p.requires_grad and name not in averaged}


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and values; equal digests mean equal bits.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
        (True, False)
    """
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # a contiguous tensor may have any stride along dimensions of length 0 or 1, which torch cannot view as bytes
    hashed.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
