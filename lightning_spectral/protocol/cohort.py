"""Who takes part in one round, and what an algorithm may use to prepare it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from lightning_spectral.protocol.records import Key, Tensors, WorkUnit, num_bytes

T = TypeVar("T")


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
        return sum(map(num_bytes, [*self._entries.values(), *self._written.values()]))

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


class Workers:
    """The processes that prepare a round together: by default this one alone."""

    def share_out(
        self, pieces: Sequence[T], do: Callable[[T], tuple[Tensor, ...]], cost: Callable[[T], float]
    ) -> list[tuple[Tensor, ...]]:
        """Do each piece of work in one process and send its tensors to all.

        Args:
            pieces: The work, the same list in every process.
            do: Maps a piece to its tensors.
            cost: Predicted time of a piece, any unit.
        """
        return [do(piece) for piece in pieces]


@dataclass(frozen=True, eq=False)
class Cohort:
    """Who takes part in one round.

    Attributes:
        seed: The run's seed.
        round_idx: Communication round, from 0.
        groups: For each distinct capacity, its units by ascending client id.
        workers: The processes that share costly preparation.
        store: State of single clients that the server keeps from round to round.
        absolute: Whether coefficients are used as they are, as for an unbiased sampler, and not divided by their sum.
        shares: For each unit, its client's share d of all examples of the model, whoever takes part.
    """

    seed: int
    round_idx: int
    groups: Mapping[float, tuple[WorkUnit, ...]]
    workers: Workers = field(default_factory=Workers)
    store: ClientStore = field(default_factory=ClientStore)
    absolute: bool = False
    shares: Mapping[Key, float] = field(default_factory=dict)

    @cached_property
    def total(self) -> float:
        """Sum of the coefficients of all units, whether or not they report back."""
        return fsum(unit.coefficient for units in self.groups.values() for unit in units)

    @cached_property
    def _capacities(self) -> Mapping[Key, float]:
        return {unit.key: capacity for capacity, units in self.groups.items() for unit in units}

    def capacity_of(self, unit: WorkUnit) -> float:
        """What the client of a unit can hold: its keep ratio, or what its algorithm calls so."""
        return self._capacities[unit.key]

    @cached_property
    def _places(self) -> Mapping[Key, int]:
        return {unit.key: place for place, unit in enumerate(chain(*self.groups.values()))}

    def place_of(self, unit: WorkUnit) -> tuple[int, int]:
        """A unit's index among all units, from 0, and the number of units.

        Example:
            >>> Cohort(0, 0, {0.5: (WorkUnit(7),), 1.0: (WorkUnit(2), WorkUnit(3))}).place_of(WorkUnit(2))
            (1, 3)
        """
        return self._places[unit.key], len(self._places)

    def weights_of(self, units: Sequence[WorkUnit]) -> Tensor:
        """Weights of units in an average over the cohort, shape ``(C,)``, float64; equal if no client has data.

        Example:
            >>> units = (WorkUnit(1, coefficient=30), WorkUnit(2, coefficient=10))
            >>> Cohort(0, 0, {1.0: units}).weights_of(units)
            tensor([0.7500, 0.2500], dtype=torch.float64)
        """
        whole = self.total or float(len(self._capacities))
        return torch.tensor([unit.coefficient if self.total else 1.0 for unit in units], dtype=torch.float64) / whole
