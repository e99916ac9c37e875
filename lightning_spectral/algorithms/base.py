"""The contract of an algorithm: what a client holds, and how it goes down and comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.local_optimizer import LocalOptimizer
from lightning_spectral.protocol.per_client import Assigned, assign
from lightning_spectral.protocol.records import Cohort, Download, Upload
from lightning_spectral.protocol.statistics import RunningMean

RoundT = TypeVar("RoundT")
AlgorithmT = TypeVar("AlgorithmT", bound="Algorithm[Any]")


class Algorithm(ABC, Generic[RoundT]):
    """What travels, as methods that hold no state of their own.

    An algorithm is a choice the user makes: immutable, and free to be used in several runs at once. What belongs to
    one round lives in the value that `refresh` returns and the other methods receive.
    """

    def keep_ratios(self, num_clients: int, seed: int) -> Assigned[float]:
        """Keep ratio of every client; a pure function of its arguments. Here: 1 for all."""
        return assign(1.0, num_clients, seed, "keep ratios")

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if this algorithm cannot train ``server``. Here: it can."""
        return None

    def prepare(self: AlgorithmT, server: nn.Module) -> AlgorithmT:
        """This algorithm with everything decided that depends on the server's module, once for all rounds.

        Here: nothing does.
        """
        return self

    def check_optimizer(self, template: Optimizer) -> None:
        """Look at the user's optimizer once, before training. Here: any will do."""
        return None

    @abstractmethod
    def build(self, server: nn.Module, keep_ratio: float) -> nn.Module:
        """A sub-model of ``server`` of one keep ratio; its values arrive later by `load`."""

    @abstractmethod
    def local_optimizer(self, template: Optimizer, server: nn.Module, client: nn.Module) -> LocalOptimizer:
        """The user's optimizer ``template``, over ``server``, rebuilt over a sub-model, with the hooks it needs."""

    def watched(self, client: nn.Module) -> Mapping[str, nn.Parameter]:
        """For each layer that must take part in training, by name, one parameter. Here: none, nothing is sharded."""
        return {}

    @abstractmethod
    def refresh(self, server: nn.Module, cohort: Cohort) -> RoundT:
        """Open a round: look at the server's weights once.

        Args:
            server: The server's module.
            cohort: Who takes part.
        """

    @abstractmethod
    def sample(self, round_state: RoundT, keep_ratio: float, key: tuple[Any, ...]) -> Download:
        """Draw what one client gets. ``key`` is (seed, round_idx, client_id): all that the draw depends on."""

    @abstractmethod
    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite a sub-model's values with what one client gets."""

    @abstractmethod
    def collect(self, round_state: RoundT, client: nn.Module, num_examples: int) -> Upload:
        """What comes back from a trained sub-model."""

    @abstractmethod
    def add(self, round_state: RoundT, download: Download, upload: Upload) -> None:
        """Add one client's update to the round's running sums."""

    def running_means(self, round_state: RoundT) -> Sequence[RunningMean]:
        """The round's running sums, which several processes add up before `apply`.

        Raises:
            NotImplementedError: Here. An algorithm without it trains in a single process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} runs in one process; define `running_means(round_state)`, which returns the "
            "`MeanChange` and `MeanTermChange` objects of the round, to let several processes add them up."
        )

    @abstractmethod
    def apply(self, server: nn.Module, round_state: RoundT) -> None:
        """Finish the average: pseudo-gradients into ``server``'s parameters, averaged buffers in place."""

    def diagnostics(self, round_state: RoundT) -> Mapping[str, float]:
        """Figures of a round to log, by name. Here: none."""
        return {}
