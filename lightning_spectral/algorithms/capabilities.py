"""What only some algorithms can do or need, asked for by capability: nobody outside a system tests for its class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.nn.cost import Cost
from lightning_spectral.protocol.cohort import SharesWork
from lightning_spectral.protocol.records import Receipt, RoundSummary, Upload
from lightning_spectral.protocol.work_unit import WorkUnit

# Of a choice


@runtime_checkable
class ChecksOptimizers(Protocol):
    """An algorithm that not every optimizer of a user's suits."""

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Raise ``ValueError`` if clients cannot train with one of the user's optimizers; warn if they train worse."""


@runtime_checkable
class ChecksServerOptimizer(Protocol):
    """An algorithm that not every server optimizer suits."""

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` if the server cannot step with ``optimizer``."""


@runtime_checkable
class SavesPeftAdapters(Protocol):
    """An algorithm whose result is an adapter on the weights with which the first fit began."""

    def save_peft_adapter(self, server: nn.Module, state: nn.Module | None, folder: Path, submodule: str) -> None:
        """Save the adapter in PEFT's format, for a part of the module."""


@runtime_checkable
class Narrows(Protocol):
    """An algorithm that trains smaller models inside the whole one."""

    def narrow(self, server: nn.Module, state: nn.Module | None, width: float) -> nn.Module:
        """A copy of the server's module at a smaller width, in (0, 1]."""


@runtime_checkable
class ChecksAverageEstimation(Protocol):
    """An algorithm whose server's module may hold running averages of another model than the whole one."""

    def check_average_estimation(self) -> None:
        """Raise ``ValueError`` if it does, so that averages of the whole model must not replace them."""


@runtime_checkable
class DrawsNetworks(Protocol):
    """An algorithm whose server holds the mean of random networks."""

    def network(
        self, server: nn.Module, state: nn.Module | None, generator: torch.Generator | None = None
    ) -> Mapping[str, Tensor]:
        """The weights of one network that ``generator`` draws, by name; without one, those of the mean."""


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
    """An algorithm whose clients hold ceil(r N) of N parts, for one N or several."""

    def cut_sizes(self, server: nn.Module) -> Collection[int]:
        """These numbers N."""


@runtime_checkable
class PlansAhead(Protocol):
    """An algorithm that plans with an example input."""

    def planned(self, server: nn.Module) -> Algorithm:
        """The same choice with the plan of ``server``, so that no example is needed any more."""


# Of a state


@runtime_checkable
class HasHistograms(Protocol):
    """A state with tensors whose distribution is worth seeing."""

    def histograms(self) -> Mapping[str, Tensor]:
        """These tensors, by the names under which dashboards show their histograms."""


# Of a server half


@runtime_checkable
class CostsBesides(Protocol):
    """A half whose clients work, or hold something in memory, besides their model."""

    @property
    def cost_besides(self) -> Cost:
        """What that costs each of them."""


@runtime_checkable
class Initializes(Protocol):
    """A half that changes the server's initial weights, or has something to say about them."""

    def initialize(self, workers: SharesWork) -> str:
        """Change the initial weights, once, before the first round of a run that is not resumed.

        Args:
            workers: The processes of the run. All of them call this, and must end up with the same weights.

        Returns:
            What the user should know of it, one sentence a line; empty if there is nothing to say.
        """


@runtime_checkable
class WarnsAfterwards(Protocol):
    """A half that may find something wrong with the first round."""

    def warnings_after(self, summary: RoundSummary) -> Sequence[str]:
        """Warnings for the user after round 0 if clients trained in it, each with its remedy."""


@runtime_checkable
class MayRestAverages(Protocol):
    """A half whose clients may leave BatchNorm's running averages as they are, without a warning."""

    @property
    def averages_may_rest(self) -> bool:
        """Whether they may, with this module."""


@runtime_checkable
class RemediesLargeUpdates(Protocol):
    """A half with a remedy of its own for rounds that move the weights too far."""

    @property
    def remedy_for_large_updates(self) -> str:
        """What the user can do, in the imperative and without a full stop; empty if it is done already."""


@runtime_checkable
class RemediesFlatLosses(Protocol):
    """A half whose sub-models may keep a run from learning."""

    @property
    def remedy_for_flat_losses(self) -> str:
        """What the user can do, in the imperative and without a full stop; empty if they are not the cause."""


@runtime_checkable
class RemediesUnusedLayers(Protocol):
    """A half that can leave layers out which no client trains."""

    @property
    def remedy_for_unused_layers(self) -> str:
        """What the user can do, in the imperative and without a full stop."""


@runtime_checkable
class MovesFrozenTensors(Protocol):
    """A half that may change tensors which clients hold frozen."""

    @property
    def moving_tensors(self) -> Collection[str]:
        """Names of the frozen tensors that change, and travel, in every round."""


# Of a round


@runtime_checkable
class Warns(Protocol):
    """A round that may find something wrong before any client trains."""

    def warnings(self) -> Sequence[str]:
        """Warnings for the user before round 0, each with its remedy."""


@runtime_checkable
class Remarks(Protocol):
    """A round of which a user should know something that is no mistake."""

    def remarks(self) -> Sequence[str]:
        """Sentences to print before round 0."""


@runtime_checkable
class BoundsSummands(Protocol):
    """A round that sums other values than the uploaded ones."""

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        """Largest magnitude that `Round.add` will compute from an upload and sum exactly, or a bound on it.

        If it is too large for an exact sum, the client is left out even if the values it sent are small enough.
        """


@runtime_checkable
class ExpectsUpdates(Protocol):
    """A round that expects something of a unit's update before it trains, e.g. its last one."""

    def expected_update(self, unit: WorkUnit) -> Mapping[str, Tensor]:
        """The expected change of the server's tensors, by name."""


@runtime_checkable
class DrawsTerms(Protocol):
    """A round in which clients hold drawn singular terms of the server's matrices."""

    @property
    def term_draws(self) -> Mapping[str, TermDraws]:
        """How clients draw the terms of each sharded matrix, by its dotted name; may be empty."""

    def visited_terms(self) -> Mapping[str, Tensor]:
        """Which terms of each sharded matrix some client held, among those added so far: shape ``(N,)``, bool."""
