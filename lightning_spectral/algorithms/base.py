"""The interface of the server half of an algorithm."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.client.side import ClientSide
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.frozen_base import frozen_parameters
from lightning_spectral.protocol.per_client import Assigned, assign
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import RunningMean

RoundT = TypeVar("RoundT")
AlgorithmT = TypeVar("AlgorithmT", bound="Algorithm[Any]")
# Methods of `ClientSide`, except `start`, which both halves have.
DEVICE_METHODS = ("build", "load", "local_optimizer", "collect", "watched")


class Algorithm(ABC, Generic[RoundT]):
    """Decides what the server sends, and how it averages the uploads. The other half, `ClientSide`, runs on devices.

    An algorithm is immutable, so several runs can use it at once. The state of a round belongs to the value that `open`
    returns and other methods receive; state that lasts between rounds belongs to the module that `start` returns.

    Attributes:
        updates_have_norms: Whether devices send back new values of the tensors that they were sent. A class that
            defines `add` or `client_side` says so itself, or samplers that go by norms of updates refuse it.
        acts_alone: Whether the server takes a step even in a round without clients, e.g. from what it has stored of
            them.
    """

    updates_have_norms: ClassVar[bool] = True
    acts_alone: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """Refuse a class that defines methods of the device half, which would never be called here.

        Raises:
            TypeError: If the class defines a method of `ClientSide`.
        """
        super().__init_subclass__()
        if misplaced := [name for name in DEVICE_METHODS if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(misplaced)}, which a device calls: write a ClientSide with it, and "
                "return that from `client_side`."
            )

    def keep_ratios(self, num_clients: int, seed: int) -> Assigned[float]:
        """Keep ratio of every client; a pure function of its arguments. By default 1 for all clients."""
        return assign(1.0, num_clients, seed, "keep ratios")

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if this algorithm cannot train ``server``. By default it can train any module."""
        return None

    def prepare(self: AlgorithmT, server: nn.Module) -> AlgorithmT:
        """Decide everything that depends on the server's module, once for all rounds, and return the result.

        By default the algorithm is returned unchanged.
        """
        return self

    def decisions(self) -> Mapping[str, Any]:
        """What `prepare` has decided from the initial weights, as plain values for checkpoints. By default nothing."""
        return {}

    def resume(self: AlgorithmT, server: nn.Module, decisions: Mapping[str, Any]) -> AlgorithmT:
        """`prepare` for a resumed run: what the initial weights decided stays decided. By default just `prepare`.

        Args:
            server: The server's module, with the weights of a checkpoint.
            decisions: What `decisions` returned when the run began; empty if the checkpoint has none.
        """
        return self.prepare(server)

    def leave_untrained(self: AlgorithmT, server: nn.Module, names: Collection[str]) -> AlgorithmT:
        """Leave parameters as they are that need a gradient, but that no optimizer of the user steps.

        Called on the algorithm that `prepare` returned. By default it is returned unchanged: clients and server step
        only the parameters in the user's optimizers.

        Args:
            server: The server's module.
            names: Names of these parameters.

        Raises:
            ValueError: If the algorithm would change them without any training.
        """
        return self

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Check one of the user's optimizers, over ``server``'s parameters, before training. By default any will do."""
        return None

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` if the server cannot step with ``optimizer``. By default any will do."""
        return None

    @abstractmethod
    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half, which is built once and sent once to each device."""

    def initialize(self, server: nn.Module, workers: SharesWork) -> str:
        """Change the server's initial weights, once, before the first round of a run that is not resumed.

        By default they are unchanged.

        Args:
            server: The server's module; this algorithm was prepared for it.
            workers: The processes of the run. All of them call this, and must end up with the same weights.

        Returns:
            What the user should know of it, one sentence a line; empty if there is nothing to say.
        """
        return ""

    def start(self, server: nn.Module, seed: int) -> nn.Module | None:
        """The state that the algorithm keeps between rounds, as a module; by default ``None``.

        The ``FederatedModule`` registers it as ``state``, so Lightning saves, moves and resumes it, and the server
        optimizer steps those of its parameters that have a gradient after `close`.

        Args:
            server: The server's module.
            seed: The run's seed, for random draws.
        """
        return None

    def frozen_tensors(self, server: nn.Module, state: nn.Module | None) -> Mapping[str, Tensor]:
        """The tensors of every download that do not change between rounds: they are sent to each client once.

        A value that does change is sent again. By default, the parameters that need no gradient.

        Args:
            server: The server's module.
            state: What `start` returned.

        Returns:
            Tensors by their names in the download; the names are the same in every round.
        """
        return frozen_parameters(server)

    @abstractmethod
    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> RoundT:
        """Open a round: prepare it from the server's weights.

        Args:
            server: The server's module.
            state: What `start` returned.
            cohort: The clients that take part.
        """

    @abstractmethod
    def send(self, opened: RoundT, unit: WorkUnit) -> tuple[Download, Receipt]:
        """The download of one unit, and the receipt that the server keeps of it.

        Random draws depend only on the run's seed, the round and ``unit.ids``.
        """

    @abstractmethod
    def add(self, opened: RoundT, receipt: Receipt, upload: Upload) -> None:
        """Add one unit's update to the round's running sums."""

    def largest_summand(self, opened: RoundT, receipt: Receipt, upload: Upload) -> float:
        """Largest magnitude that `add` will compute from an update and sum exactly, or a bound on it.

        If it is too large for an exact sum, the client is left out even if the values it sent are small enough. By
        default 0, for algorithms that sum the uploaded values themselves.
        """
        return 0.0

    def expected_update(self, opened: RoundT, unit: WorkUnit) -> Mapping[str, Tensor]:
        """The change that the server expects before a unit trains, by name, e.g. its last one. By default none."""
        return {}

    def running_means(self, opened: RoundT) -> Sequence[RunningMean]:
        """The round's running sums, which several processes add up before `close`.

        Raises:
            NotImplementedError: By default. An algorithm that does not define this method trains in a single process.
        """
        raise NotImplementedError(
            f"{type(self).__name__} runs in one process; define `running_means(opened)`, which returns the "
            "`MeanChange` and `MeanTermChange` objects of the round, to let several processes add them up."
        )

    @abstractmethod
    def close(self, server: nn.Module, state: nn.Module | None, opened: RoundT) -> None:
        """Finish the average: set pseudo-gradients of ``server``'s or ``state``'s parameters, and buffers in place."""

    def settle(self, server: nn.Module, state: nn.Module | None) -> None:
        """Update ``server`` from the state, before the first round and after each step of the server optimizer.

        By default this does nothing. Evaluation and checkpoints see the weights that ``server`` has afterwards.
        """
        return None

    def averages_may_rest(self, server: nn.Module) -> bool:
        """Whether BatchNorm's running averages may stay unchanged in a round in which clients train.

        If not, a warning says so after the first round. By default they may not.
        """
        return False

    def concerns(self, opened: RoundT) -> Sequence[str]:
        """Warnings for the user before the first round trains, each with its remedy. By default none."""
        return ()

    def concerns_after(self, summary: RoundSummary) -> Sequence[str]:
        """Warnings for the user after round 0 if clients trained in it, each with its remedy. By default none."""
        return ()

    def diagnostics(self, opened: RoundT) -> Mapping[str, float]:
        """Figures to log for a round, by name. By default none."""
        return {}
