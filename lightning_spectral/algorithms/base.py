"""The server half of an algorithm: the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.side import ClientSide
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.per_client import Assigned, assign
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.statistics import RunningMean
from lightning_spectral.protocol.work_unit import WorkUnit

RoundT = TypeVar("RoundT")
AlgorithmT = TypeVar("AlgorithmT", bound="Algorithm[Any]")
# Of `ClientSide`; both halves have a `start`.
DEVICE_METHODS = ("build", "load", "local_optimizer", "collect", "watched")


class Algorithm(ABC, Generic[RoundT]):
    """What the server sends, and what it makes of the answers. Its other half, `ClientSide`, runs on devices.

    An algorithm is a choice the user makes: immutable, and free to be used in several runs at once. What belongs to
    one round lives in the value that `open` returns and other methods receive. What is to last from one round to the
    next lives in the module that `start` returns.
    """

    def __init_subclass__(cls) -> None:
        """Refuse a class whose device half would never be called.

        Raises:
            TypeError: If it defines a method of `ClientSide`.
        """
        super().__init_subclass__()
        if misplaced := [name for name in DEVICE_METHODS if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(misplaced)}, which a device calls: write a ClientSide with it, and "
                "return that from `client_side`."
            )

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
    def client_side(self, server: nn.Module) -> ClientSide:
        """What devices have to know: built once, sent to each of them once."""

    def start(self, server: nn.Module, seed: int) -> nn.Module | None:
        """What the algorithm owns between rounds, as a module; ``None``, as here, for nothing.

        The ``FederatedModule`` registers it as ``state``. So Lightning saves, moves and resumes it, and the server
        optimizer steps those of its parameters that have a gradient after `close`.

        Args:
            server: The server's module.
            seed: The run's seed, for what is drawn.
        """
        return None

    @abstractmethod
    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> RoundT:
        """Open a round: look at the server's weights once.

        Args:
            server: The server's module.
            state: What `start` returned.
            cohort: Who takes part.
        """

    @abstractmethod
    def send(self, opened: RoundT, unit: WorkUnit) -> tuple[Download, Receipt]:
        """What one unit gets, and the note that the server keeps of it.

        Draws depend on the run's seed, the round and ``unit.ids`` alone.
        """

    @abstractmethod
    def add(self, opened: RoundT, receipt: Receipt, upload: Upload) -> None:
        """Add one unit's update to the round's running sums."""

    def running_means(self, opened: RoundT) -> Sequence[RunningMean]:
        """The round's running sums, which several processes add up before `close`.

        Raises:
            NotImplementedError: Here. An algorithm without it trains in a single process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} runs in one process; define `running_means(opened)`, which returns the "
            "`MeanChange` and `MeanTermChange` objects of the round, to let several processes add them up."
        )

    @abstractmethod
    def close(self, server: nn.Module, state: nn.Module | None, opened: RoundT) -> None:
        """Finish the average: pseudo-gradients into ``server``'s or ``state``'s parameters, buffers in place."""

    def settle(self, server: nn.Module, state: nn.Module | None) -> None:
        """Write what follows from the state into ``server``, after the server optimizer stepped. Here: nothing does.

        Evaluation and checkpoints see the weights that are in ``server`` afterwards.
        """
        return None

    def diagnostics(self, opened: RoundT) -> Mapping[str, float]:
        """Figures of a round to log, by name. Here: none."""
        return {}
