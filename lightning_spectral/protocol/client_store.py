"""What the server remembers of single clients from round to round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_spectral.protocol.work_unit import WorkUnit

Tensors = Mapping[str, Tensor]
Key = tuple[int, str]


class ClientStore:
    """Named tensors for each client and model: control variates, stale updates, last losses.

    It is empty until an algorithm writes into it, and it is part of the checkpoint. In several processes each writes
    for the clients that it trained; `changes` and `merge` let all of them end a round with the same content.

    Example:
        >>> import torch
        >>> store, unit = ClientStore(), WorkUnit(3)
        >>> store[unit] = {"loss": torch.zeros(2)}
        >>> unit in store, store.num_bytes, store[unit]["loss"]
        (True, 8, tensor([0., 0.]))
    """

    def __init__(self) -> None:
        self._entries: dict[Key, dict[str, Tensor]] = {}
        self._changed: set[Key] = set()

    def __getitem__(self, unit: WorkUnit) -> Tensors:
        return self._entries[unit.key]

    def __setitem__(self, unit: WorkUnit, tensors: Tensors) -> None:
        """Remember copies of some tensors, in place of what was there."""
        self._entries[unit.key] = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self._changed.add(unit.key)

    def __contains__(self, unit: WorkUnit) -> bool:
        return unit.key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted(self._entries))

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(t.numel() * t.element_size() for entry in self._entries.values() for t in entry.values())

    def changes(self) -> dict[Key, dict[str, Tensor]]:
        """What was written since `changes` was last asked for, on the CPU."""
        changed = {key: {n: t.cpu() for n, t in self._entries[key].items()} for key in sorted(self._changed)}
        self._changed.clear()
        return changed

    def merge(self, changes: Mapping[Key, Tensors], device: Any = "cpu") -> None:
        """Take over what another process wrote."""
        for key, tensors in changes.items():
            self._entries[key] = {name: tensor.to(device) for name, tensor in tensors.items()}

    def state_dict(self) -> dict[Key, dict[str, Tensor]]:
        """Everything, for the checkpoint."""
        return {key: dict(self._entries[key]) for key in self}

    def load_state_dict(self, state_dict: Mapping[Key, Tensors]) -> None:
        """Everything, from a checkpoint."""
        self._entries = {key: dict(tensors) for key, tensors in state_dict.items()}
        self._changed.clear()
