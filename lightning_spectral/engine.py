"""One round after another: plain torch, told when by callbacks and what by an algorithm."""

from __future__ import annotations

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.errors import ClientError, RoundError, SpectralWarning
from lightning_spectral.federated.local import LocalResult, Placement
from lightning_spectral.federated.local_hooks import LocalHook
from lightning_spectral.federated.local_optimizer import LocalOptimizer
from lightning_spectral.federated.local_trainer import LocalTrainer
from lightning_spectral.federated.metrics import round_means
from lightning_spectral.federated.participates import GradientWatch
from lightning_spectral.federated.processes import Processes, raise_everywhere
from lightning_spectral.federated.recorder import Recorder
from lightning_spectral.federated.records import (
    ClientOutcome,
    ClientTask,
    Cohort,
    Download,
    IdleTask,
    RoundSummary,
    Upload,
)
from lightning_spectral.federated.rng import derived_seed, isolated_rng
from lightning_spectral.federated.statistics import add_up

STAGES = ("refresh", "sample", "load", "train", "aggregate", "apply")


@dataclass(frozen=True, eq=False)
class SubModel:
    """The client-side module of one keep ratio; every client of that ratio trains it in turn.

    Attributes:
        module: A copy of the user's module whose ``log`` is the engine's recorder.
        optimizers: The user's optimizers over it; one, but for modules that optimise manually.
    """

    module: Any
    optimizers: tuple[LocalOptimizer, ...]


class Engine:
    """The server's module, one sub-model per keep ratio of the cohorts seen, and the open round.

    Args:
        server: The user's module with dense weights.
        algorithm: What travels.
        keep_ratios: Keep ratio of every client, shape ``(num_clients,)``.
        make_sub_model: From a keep ratio and the recorder of what clients log to a sub-model.
        local_trainer: Runs a client's local epochs.
        local_epochs: Passes over a client's data in a round.
        placement: Device and precision of local training.
        seed: The run's seed.
        local_hooks: What acts on a client's gradients before each step, in this order.
        profile: Entered around each stage, by its name in `STAGES`.
        processes: Who trains the clients of a round; each in an engine of its own, over the same server.
    """

    def __init__(
        self,
        server: nn.Module,
        algorithm: Algorithm[Any],
        *,
        keep_ratios: Tensor,
        make_sub_model: Callable[[float, Recorder], SubModel],
        local_trainer: LocalTrainer,
        local_epochs: int,
        placement: Placement,
        seed: int,
        local_hooks: Sequence[LocalHook] = (),
        profile: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        processes: Processes | None = None,
    ) -> None:
        self.server = server
        self.algorithm = algorithm.prepare(server)
        self.keep_ratios = keep_ratios
        self.local_trainer = local_trainer
        self.local_epochs = local_epochs
        self.placement = placement
        self.seed = seed
        self.local_hooks = tuple(local_hooks)
        self._profile = profile
        self.processes = Processes() if processes is None else processes
        self._make_sub_model = make_sub_model
        self._sub_models: dict[float, SubModel] = {}
        self._recorder = Recorder()
        self._seconds: dict[str, float] = {}
        self._outcomes: list[ClientOutcome] = []
        self._round: Any = None
        self._places: dict[int, int] = {}
        self._failure: Exception | None = None
        self._participation_checked = False

    @property
    def round_state(self) -> Any:
        """What the algorithm made of the server's weights for the open round; ``None`` between rounds."""
        return self._round

    @property
    def round_is_open(self) -> bool:
        """Whether clients have been, or are being, trained whose updates the server's weights do not have yet."""
        return self._round is not None

    def open_round(self, round_idx: int, num_examples: Mapping[int, int]) -> None:
        """Look at the server's weights once and prepare for this cohort.

        Args:
            round_idx: Communication round, from 0.
            num_examples: Number of examples of each client that takes part, by id, in the cohort's order.
        """
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._outcomes, self._failure = [], None
        self._places = {client_id: place for place, client_id in enumerate(num_examples)}
        with self._timed("refresh"):
            groups: dict[float, list[int]] = defaultdict(list)
            for client_id in sorted(num_examples):
                groups[self._keep_ratio(client_id)].append(client_id)
            members = {ratio: tuple(client_ids) for ratio, client_ids in groups.items()}
            cohort = Cohort(self.seed, round_idx, members, num_examples, self.processes)
            self._round = self.algorithm.refresh(self.server, cohort)

    def expects(self, task: ClientTask | IdleTask) -> TypeGuard[ClientTask]:
        """Whether there is a client to train in this turn, in a round that has not failed here."""
        return isinstance(task, ClientTask) and self._failure is None

    @contextmanager
    def client_turn(self, task: ClientTask) -> Iterator[None]:
        """Around what is done for one client. Among several processes a failure waits until all meet in `close_round`.

        Raised at once it would leave the others waiting for this process.
        """
        try:
            yield
        except Exception as error:
            if self.processes.size == 1:
                raise
            self._failure = error if isinstance(error, ClientError) else _with_address(task, "", error)
            self._failure.__cause__ = error

    def send(self, task: ClientTask) -> Download:
        """Draw what one client gets and load it into the sub-model of its keep ratio."""
        keep_ratio = self._keep_ratio(task.client_id)
        with self._timed("sample"), _blamed(task, "sampling"):
            key = (self.seed, task.round_idx, task.client_id)
            download = self.algorithm.sample(self._round, keep_ratio, key)
        with self._timed("load"), _blamed(task, "loading"):
            self.algorithm.load(self.sub_model(keep_ratio).module, download)
        return download

    def train(self, task: ClientTask, download: Download) -> LocalResult:
        """Run the client's local epochs on the loaded sub-model.

        Raises:
            ValueError: If the first client's turn shows a sharded layer that takes no part in training, or gradients
                that reach the server's own weights.
        """
        sub_model = self.sub_model(download.keep_ratio)
        watch = None if self._participation_checked else GradientWatch(self.algorithm.watched(sub_model.module))
        with self._timed("train"), _blamed(task, "local training"), self._isolated_rng(task):
            for local in sub_model.optimizers:
                local.start_client()
            self._recorder.start_client(sub_model.module)
            result = self.local_trainer.train(
                sub_model.module,
                [local.optimizer for local in sub_model.optimizers],
                task,
                local_epochs=self.local_epochs,
                recorder=self._recorder,
                placement=self.placement,
                local_hooks=self.local_hooks,
            )
        if watch is not None and result.num_steps > 0:
            watch.check(self.server)
            self._participation_checked = True
        return result

    def receive(self, task: ClientTask, download: Download, result: LocalResult) -> ClientOutcome:
        """Add the client's update to the round's sums; one that cannot be averaged is left out and said."""
        with self._timed("aggregate"), _blamed(task, "aggregation"):
            module = self.sub_model(download.keep_ratio).module
            upload = self.algorithm.collect(self._round, module, task.num_examples)
            left_out = not upload.can_be_averaged()
            if not left_out:
                self.algorithm.add(self._round, download, upload)
            logged = {} if left_out else self._recorder.finish_client()
        if left_out:
            _warn_left_out(task, upload)
        outcome = ClientOutcome(
            round_idx=task.round_idx,
            client_id=task.client_id,
            keep_ratio=download.keep_ratio,
            num_examples=task.num_examples,
            num_steps=result.num_steps,
            loss=result.loss,
            downlink_bytes=download.num_bytes,
            uplink_bytes=upload.num_bytes,
            left_out=left_out,
            logged=logged,
        )
        self._outcomes.append(outcome)
        return outcome

    def close_round(self, round_idx: int) -> RoundSummary:
        """Finish the average: afterwards the server's parameters carry the round's pseudo-gradient.

        All processes call it together and end with the same.

        Raises:
            ClientError: If a client failed in one of several processes.
            RoundError: If no client's update could be used; the server's weights are as before the round.
        """
        outcomes = self._meet()
        if all(outcome.left_out for outcome in outcomes):
            ids = ", ".join(str(outcome.client_id) for outcome in outcomes)
            raise RoundError(
                f"Round {round_idx}: no client returned a finite update (clients {ids}); the server's weights are "
                "unchanged. Lower the learning rate, or clip (`clip_tau`), and look at these clients' data."
            )
        with self._timed("aggregate"):
            add_up(self.processes, self.algorithm.running_means(self._round))
        with self._timed("apply"):
            self.algorithm.apply(self.server, self._round)
        diagnostics = self.algorithm.diagnostics(self._round)
        self._round = None
        return RoundSummary(round_idx, outcomes, dict(self._seconds), diagnostics, round_means(outcomes))

    def _meet(self) -> tuple[ClientOutcome, ...]:
        """What all processes say of their clients, in the cohort's order; an error everywhere if one failed."""
        failure = None if self._failure is None else str(self._failure)
        said = self.processes.gather((failure, self._outcomes, self._seconds))
        raise_everywhere([failure for failure, *_ in said], self._failure, ClientError)
        self._seconds = {stage: max(seconds[stage] for *_, seconds in said) for stage in STAGES}
        outcomes = [outcome for _, outcomes, _ in said for outcome in outcomes]
        return tuple(sorted(outcomes, key=lambda outcome: self._places[outcome.client_id]))

    def sub_model(self, keep_ratio: float) -> SubModel:
        """The sub-model of one keep ratio, built when its first client comes."""
        if keep_ratio not in self._sub_models:
            self._sub_models[keep_ratio] = self._make_sub_model(keep_ratio, self._recorder)
        return self._sub_models[keep_ratio]

    def _keep_ratio(self, client_id: int) -> float:
        return float(self.keep_ratios[client_id])

    def _isolated_rng(self, task: ClientTask) -> AbstractContextManager[None]:
        """Dropout and augmentation draw from the global generators: seeded per client, restored afterwards."""
        seed = derived_seed(self.seed, "local training", task.round_idx, task.client_id)
        return isolated_rng(seed, [self.placement.device])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._profile(stage):
            yield
        self._seconds[stage] += time.perf_counter() - start


@contextmanager
def _blamed(task: ClientTask, stage: str) -> Iterator[None]:
    """Name the round, the client and the stage of whatever fails."""
    try:
        yield
    except Exception as error:
        raise _with_address(task, f", {stage}", error) from error


def _with_address(task: ClientTask, stage: str, error: Exception) -> ClientError:
    return ClientError(f"Round {task.round_idx}, client {task.client_id}{stage}: {type(error).__name__}: {error}")


def _warn_left_out(task: ClientTask, upload: Upload) -> None:
    fault = f"holds values up to {upload.largest:.0e}" if math.isfinite(upload.largest) else "is not finite"
    warnings.warn(
        f"Round {task.round_idx}: the update of client {task.client_id} {fault}; it is left out of the average.",
        SpectralWarning,
        stacklevel=3,
    )
