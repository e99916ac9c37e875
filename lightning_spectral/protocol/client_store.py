"""What the server remembers of single clients from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.protocol.work_unit import WorkUnit

Tensors = Mapping[str, Tensor]
Key = tuple[int, str]


class ClientStore:
    """Named tensors for each client and model: control variates, stale updates, last losses.

    It is empty until an algorithm writes into it. What is written during a round is read back at once, but belongs to
    the store only when the round ends: a checkpoint within a round, and a round that fails, hold none of it. In several
    processes each writes for the clients that it trained; `written` and `merge` let all of them end a round with the
    same content.

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

    def __getitem__(self, unit: WorkUnit) -> Tensors:
        return self._written[unit.key] if unit.key in self._written else self._entries[unit.key]

    def __setitem__(self, unit: WorkUnit, tensors: Tensors) -> None:
        """Remember copies of some tensors, in place of what was there."""
        self._written[unit.key] = {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.key in self._written or unit.key in self._entries

    def __len__(self) -> int:
        return len(self._entries | self._written)

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self._entries | self._written))

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        entries = [*self._entries.values(), *self._written.values()]
        return sum(tensor.numel() * tensor.element_size() for entry in entries for tensor in entry.values())

    def written(self) -> dict[Key, dict[str, Tensor]]:
        """What this round wrote so far, on the CPU: what other processes have to know."""
        return {key: {name: tensor.cpu() for name, tensor in entry.items()} for key, entry in self._written.items()}

    def merge(self, written: Mapping[Key, Tensors], device: torch.device | str = "cpu") -> None:
        """Take over what another process wrote in this round."""
        for key, tensors in written.items():
            self._written[key] = {name: tensor.to(device) for name, tensor in tensors.items()}

    def commit(self) -> None:
        """Keep what the round wrote: it is over."""
        self._entries.update(self._written)
        self._written = {}

    def discard(self) -> None:
        """Forget what a round wrote that did not end."""
        self._written = {}

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        for entry in self._entries.values():
            entry.update({name: tensor.to(device) for name, tensor in entry.items()})

    def state_dict(self) -> dict[Key, dict[str, Tensor]]:
        """Everything that finished rounds wrote, for the checkpoint."""
        return {key: dict(self._entries[key]) for key in sorted(self._entries)}

    def load_state_dict(self, state_dict: Mapping[Key, Tensors]) -> None:
        """Everything, from a checkpoint."""
        self._entries = {key: dict(tensors) for key, tensors in state_dict.items()}
        self._written = {}
