# ruff: noqa: D101
"""TEMPORARY: algorithms that have not moved to the contract of `base.py` yet."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm, Round, ServerHalf
from lightning_spectral.client.side import ClientSide
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.frozen_base import frozen_parameters
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload
from lightning_spectral.protocol.statistics import RunningMean
from lightning_spectral.protocol.work_unit import WorkUnit

RoundT = TypeVar("RoundT")
AlgorithmT = TypeVar("AlgorithmT", bound="ClassicAlgorithm[Any]")


class ClassicAlgorithm(Algorithm, Generic[RoundT]):
    """An algorithm that is its own server half and round."""

    acts_alone: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.steps_without_clients = cls.acts_alone
        cls.updates_are_expected = cls.expected_update is not ClassicAlgorithm.expected_update

    def new_state(self, server: nn.Module, seed: int) -> nn.Module | None:
        return self.start(server, seed)

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> "ClassicHalf":
        ready = self.prepare(server) if decisions is None else self.resume(server, decisions).prepare(server)
        return ClassicHalf(ready.leave_untrained(server, untrained), server, state)

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


class ClassicHalf(ServerHalf):
    def __init__(self, algorithm: ClassicAlgorithm[Any], server: nn.Module, state: nn.Module | None) -> None:
        super().__init__(server, state)
        self.algorithm = algorithm

    @property
    def device_half(self) -> ClientSide:
        return self.algorithm.client_side(self.server)

    @property
    def decisions(self) -> Mapping[str, Any]:
        return self.algorithm.decisions()

    def initialize(self, workers: SharesWork) -> str:
        return self.algorithm.initialize(self.server, workers)

    def warnings_after(self, summary: RoundSummary) -> Sequence[str]:
        return self.algorithm.concerns_after(summary)

    @property
    def averages_may_rest(self) -> bool:
        return self.algorithm.averages_may_rest(self.server)

    def frozen_tensors(self) -> Mapping[str, Tensor]:
        return self.algorithm.frozen_tensors(self.server, self.state)

    def settle(self) -> None:
        self.algorithm.settle(self.server, self.state)

    def open(self, cohort: Cohort) -> "ClassicRound":
        return ClassicRound(self, self.algorithm.open(self.server, self.state, cohort))


class ClassicRound(Round):
    def __init__(self, half: ClassicHalf, opened: Any) -> None:
        self.half, self.opened, self.algorithm = half, opened, half.algorithm

    def __getattr__(self, name: str) -> Any:
        if name in ("half", "opened", "algorithm"):
            raise AttributeError(name)
        return getattr(self.opened, name)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        return self.algorithm.send(self.opened, unit)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        self.algorithm.add(self.opened, receipt, upload)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return self.algorithm.running_means(self.opened)

    def close(self) -> None:
        self.algorithm.close(self.half.server, self.half.state, self.opened)

    def metrics(self) -> Mapping[str, float]:
        return self.algorithm.diagnostics(self.opened)

    def warnings(self) -> Sequence[str]:
        return self.algorithm.concerns(self.opened)

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        return self.algorithm.largest_summand(self.opened, receipt, upload)

    def expected_update(self, unit: WorkUnit) -> Mapping[str, Tensor]:
        return self.algorithm.expected_update(self.opened, unit)
