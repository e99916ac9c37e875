"""State of single clients that the server keeps from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.protocol.records import WorkUnit

Tensors = Mapping[str, Tensor]
Key = tuple[int, str]


class ClientStore:
    """Named tensors for each client and model: control variates, stale updates, last losses.

    It is empty until an algorithm writes to it. Everything is kept on the CPU, since a thousand clients would fill a
    GPU, and is read on the device that `to` names. What is written during a round can be read immediately, but is
    committed only when the round ends: a checkpoint within the round does not contain it, and a failed round discards
    it. Each of several processes writes for the clients that it trained; `written` and `merge` give all of them the
    same content at the end of a round.

    Example:
        >>> import torch
        >>> store, unit = ClientStore(), WorkUnit(3)
        >>> store[unit] = {"loss": torch.zeros(2)}
        >>> unit in store, store.num_bytes, store.state_dict()
        (True, 8, {})
        >>> store.commit()
        >>> store.state_dict()
        {(3, ''): {'loss': tensor([0., 0.])}}
    """

    def __init__(self) -> None:
        self._entries: dict[Key, dict[str, Tensor]] = {}
        self._written: dict[Key, dict[str, Tensor]] = {}
        self._device = torch.device("cpu")

    def __getitem__(self, unit: WorkUnit) -> Tensors:
        return {name: tensor.to(self._device) for name, tensor in self.kept(unit).items()}

    def __setitem__(self, unit: WorkUnit, tensors: Tensors) -> None:
        """Store copies of some tensors, in place of the previous ones."""
        self._written[unit.key] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.key in self._written or unit.key in self._entries

    def __len__(self) -> int:
        return len(self._entries | self._written)

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self._entries | self._written))

    def kept(self, unit: WorkUnit) -> Tensors:
        """A unit's tensors where they are kept, on the CPU."""
        return self._written[unit.key] if unit.key in self._written else self._entries[unit.key]

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors, in bytes."""
        entries = [*self._entries.values(), *self._written.values()]
        return sum(tensor.numel() * tensor.element_size() for entry in entries for tensor in entry.values())

    def written(self) -> dict[Key, dict[str, Tensor]]:
        """The entries written in this round so far, for other processes."""
        return {key: dict(entry) for key, entry in self._written.items()}

    def merge(self, written: Mapping[Key, Tensors]) -> None:
        """Add the entries that another process wrote in this round."""
        self._written.update({key: dict(tensors) for key, tensors in written.items()})

    def commit(self) -> None:
        """Keep the entries written in a round that has ended."""
        self._entries.update(self._written)
        self._written = {}

    def discard(self) -> None:
        """Drop the entries written in a round that did not end."""
        self._written = {}

    def to(self, device: torch.device | str) -> None:
        """Read everything on a device from now on."""
        self._device = torch.device(device)

    def state_dict(self) -> dict[Key, dict[str, Tensor]]:
        """The entries of all finished rounds, for the checkpoint."""
        return {key: dict(self._entries[key]) for key in sorted(self._entries)}

    def load_state_dict(self, state_dict: Mapping[Key, Tensors]) -> None:
        """Restore all entries from a checkpoint."""
        self._entries = {key: {name: t.cpu() for name, t in tensors.items()} for key, tensors in state_dict.items()}
        self._written = {}
