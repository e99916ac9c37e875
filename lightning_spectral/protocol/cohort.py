"""Who takes part in one round, and what an algorithm may use to prepare it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import fsum
from typing import TypeVar

import torch
from torch import Tensor

from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.records import Key, Options, WorkUnit

T = TypeVar("T")


class Workers:
    """The processes that prepare a round together: by default this one alone."""

    def share_out(
        self, pieces: Sequence[T], do: Callable[[T], tuple[Tensor, ...]], cost: Callable[[T], float]
    ) -> list[tuple[Tensor, ...]]:
        """Do each piece, of a list that all processes have, in one of them, and send its tensors to all."""
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
        options: Those that all clients train with, `Download.options`.
    """

    seed: int
    round_idx: int
    groups: Mapping[float, tuple[WorkUnit, ...]]
    workers: Workers = field(default_factory=Workers)
    store: ClientStore = field(default_factory=ClientStore)
    absolute: bool = False
    shares: Mapping[Key, float] = field(default_factory=dict)
    options: tuple[tuple[Options, ...], ...] = ()

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
        return {key: place for place, key in enumerate(self._capacities)}

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
