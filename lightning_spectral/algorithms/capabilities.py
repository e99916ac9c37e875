"""What only some algorithms can do, asked for by capability: nobody outside a system tests for its class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm


@runtime_checkable
class HasCapacities(Protocol):
    """An algorithm whose clients differ by something else than keep ratios, e.g. by ranks.

    Attributes:
        capacity_name: What they differ by.
        capacity_is_shared: Whether all clients of a federation have the same.
    """

    capacity_name: ClassVar[str]
    capacity_is_shared: ClassVar[bool]

    def with_capacities(self, capacities: Sequence[float]) -> Mapping[float, tuple[Algorithm, float]]:
        """For each capacity, the same choice with clients of that capacity, and their keep ratio in it."""

    def all_capacities(self, server: nn.Module) -> Sequence[float]:
        """All capacities that may differ in cost, from the smallest sub-model to the largest."""


@runtime_checkable
class CutsInto(Protocol):
    """An algorithm whose clients hold ceil(r N) parts, at most all of them, for one N or several."""

    def cut_sizes(self, server: nn.Module) -> Collection[float]:
        """These numbers N."""


@runtime_checkable
class PlansAhead(Protocol):
    """An algorithm that plans with an example input."""

    def planned(self, server: nn.Module) -> Algorithm:
        """The same choice with the plan of ``server``, so that no example is needed any more."""


@runtime_checkable
class HasHistograms(Protocol):
    """A state with tensors whose distribution is worth seeing."""

    def histograms(self) -> Mapping[str, Tensor]:
        """These tensors, by the names under which dashboards show their histograms."""


@runtime_checkable
class DrawsNetworks(Protocol):
    """An algorithm whose server holds the mean of random networks."""

    def network(
        self, server: nn.Module, state: nn.Module | None, generator: torch.Generator | None = None
    ) -> Mapping[str, Tensor]:
        """The weights of one network that ``generator`` draws, by name; without one, those of the mean."""
