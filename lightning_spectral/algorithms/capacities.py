"""Capacities: what the clients of an algorithm differ by, and how much each of them may hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from torch import nn

from lightning_spectral.functional.spectra import KEEP_RATIO
from lightning_spectral.protocol.per_client import Assigned, PerClient, assign, check_num_entries

Choice = TypeVar("Choice", covariant=True)

PARTS = 1000  # numbers of parts to try where an algorithm does not say how many its clients choose from


@dataclass(frozen=True)
class Capacities(Generic[Choice]):
    """What an algorithm's clients differ by: here by nothing, as all of them train the whole model.

    Attributes:
        name: The word for it in tables and messages.
        choice: The algorithm.
    """

    name: ClassVar[str] = "keep ratio"

    choice: Choice

    def of_clients(self, num_clients: int, seed: int) -> Assigned[float]:
        """Keep ratio of every client; a pure function of its arguments."""
        return assign(1.0, num_clients, seed, "keep ratios")

    def choices(self, capacities: Sequence[float]) -> Mapping[float, tuple[Choice, float]]:
        """For each capacity, the same choice with clients of that capacity, and their keep ratio in it.

        Choices of two capacities differ if all clients of a federation have the same one.

        Raises:
            ValueError: If there are no such clients.
        """
        if {KEEP_RATIO("capacities", capacity) for capacity in capacities} != {1.0}:
            raise ValueError(
                f"`capacities` must be [1] with {type(self.choice).__name__}, whose clients all train the whole model; "
                f"got {list(capacities)}."
            )
        return {1.0: (self.choice, 1.0)}

    def all_of(self, server: nn.Module) -> Sequence[float]:
        """All capacities that may differ in cost, from the smallest sub-model to the largest."""
        return [1.0]

    def counts(self, server: nn.Module) -> Callable[[int], Sequence[int]]:
        """All that dimensions may be multiples of, by the place of a capacity in `all_of`."""
        return lambda place: []

    def planned(self, server: nn.Module) -> Choice:
        """The same choice with the plan of ``server``, so that no example input is needed; by default without one."""
        return self.choice


@dataclass(frozen=True)
class KeepRatios(Capacities[Choice]):
    """One keep ratio for all clients, ``{ratio: share of clients}``, or one per client.

    Attributes:
        keep_ratio: They.
        numbers_of_parts: From how many parts of a module clients hold some; by default many.
    """

    keep_ratio: PerClient[float]
    numbers_of_parts: Callable[[nn.Module], Collection[float]] = field(default=lambda server: [PARTS])

    def of_clients(self, num_clients: int, seed: int) -> Assigned[float]:
        check_num_entries("keep_ratio", self.keep_ratio, num_clients)
        return assign(self.keep_ratio, num_clients, seed, "keep ratios")

    def choices(self, capacities: Sequence[float]) -> Mapping[float, tuple[Choice, float]]:
        ratios = [KEEP_RATIO("capacities", capacity) for capacity in capacities]
        return {keep_ratio: (self.choice, keep_ratio) for keep_ratio in ratios}

    def all_of(self, server: nn.Module) -> Sequence[float]:
        return ratios_of(self.numbers_of_parts(server))


def ratios_of(sizes: Collection[float]) -> list[float]:
    """The keep ratios r that differ where clients hold ceil(r N) of N parts, at most all, for some numbers N.

    Example:
        >>> ratios_of([2, 3])
        [0.3333333333333333, 0.5, 0.6666666666666666, 1.0]
    """
    return sorted({min(1.0, part / size) for size in {1, *sizes} for part in range(1, math.ceil(size) + 1)})
