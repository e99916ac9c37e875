"""One round after another: plain torch, told when by callbacks and what by an algorithm."""

from __future__ import annotations

import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.client.gradient_watch import GradientWatch
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalResult, Placement
from lightning_spectral.client.local_optimizer import LocalOptimizer
from lightning_spectral.client.local_trainer import LocalSettings, LocalTrainer
from lightning_spectral.client.recorder import Recorder
from lightning_spectral.errors import ClientError, RoundError, SpectralWarning
from lightning_spectral.protocol.exclusion import WHAT_HAPPENED, Reason
from lightning_spectral.protocol.records import (
    ClientOutcome,
    ClientTask,
    Cohort,
    Download,
    IdleTask,
    RoundSummary,
    Upload,
)
from lightning_spectral.protocol.rng import derived_seed, isolated_rng
from lightning_spectral.protocol.statistics import add_up
from lightning_spectral.server.fault_policy import Faults, clients_by_reason
from lightning_spectral.server.metrics import round_means
from lightning_spectral.server.processes import Processes, raise_everywhere
from lightning_spectral.simulation import Conditions, Fates, Turn

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
        algorithm: What travels, prepared for ``server``.
        keep_ratios: Keep ratio of every client, shape ``(num_clients,)``.
        make_sub_model: From a keep ratio and the recorder of what clients log to a sub-model.
        local_trainer: Runs a client's local epochs.
        local_epochs: Passes over a client's data in a round.
        placement: Device and precision of local training.
        seed: The run's seed.
        local_hooks: What acts on a client's gradients before each step, in this order.
        profile: Entered around each stage, by its name in `STAGES`.
        processes: Who trains the clients of a round; each in an engine of its own, over the same server.
        faults: What to do about clients that do not deliver.
        conditions: Who does not, in a simulation.
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
        faults: Faults | None = None,
        conditions: Conditions | None = None,
    ) -> None:
        self.server = server
        self.algorithm = algorithm
        self.keep_ratios = keep_ratios
        self.local_trainer = local_trainer
        self.local_settings = LocalSettings(local_epochs, Recorder(), placement, tuple(local_hooks))
        self.seed = seed
        self._profile = profile
        self.processes = Processes() if processes is None else processes
        self.faults = Faults() if faults is None else faults
        self.conditions = Conditions() if conditions is None else conditions
        self.server_moves = False
        self._make_sub_model = make_sub_model
        self._sub_models: dict[float, SubModel] = {}
        self._seconds: dict[str, float] = {}
        self._outcomes: list[ClientOutcome] = []
        self._round: Any = None
        self._places: dict[int, int] = {}
        self._failure: Exception | None = None
        self._fates = Fates()
        self._sizes: dict[float, tuple[int, int, int]] = {}
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
            turns = {client_id: self._turn(client_id, size) for client_id, size in num_examples.items()}
            self._fates = self.conditions.fates(self.seed, round_idx, turns)

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
        """Draw what one client gets and load it into the sub-model of its keep ratio, if it is going to train."""
        keep_ratio, fate = self._keep_ratio(task.client_id), self._fates.of(task.client_id)
        if fate.left_out == "no_data":
            return Download(keep_ratio, {})  # it says so before anything is sent
        with self._timed("sample"), _blamed(task, "sampling"):
            key = (self.seed, task.round_idx, task.client_id)
            download = self.algorithm.sample(self._round, keep_ratio, key)
        if fate.left_out is None:
            with self._timed("load"), _blamed(task, "loading"):
                self.algorithm.load(self.sub_model(keep_ratio).module, download)
        return download

    def train(self, task: ClientTask, download: Download) -> LocalResult:
        """Run the client's local epochs on the loaded sub-model, unless the round will go on without it.

        Raises:
            ClientError: If training fails and `Faults.on_error` says `Raise`.
            ValueError: If the first client's turn shows a sharded layer that takes no part in training, or gradients
                that reach the server's own weights.
        """
        fate = self._fates.of(task.client_id)
        if fate.left_out is not None:
            return LocalResult(0, math.nan, fate.left_out)
        try:
            result = self._train(task, download)
        except ClientError as error:
            if self.faults.ends_run("error"):
                raise
            # whatever the failure left behind, in modules, hooks or attributes, goes with the sub-model
            del self._sub_models[download.keep_ratio]
            return LocalResult(0, math.nan, "error", f"{type(error.__cause__).__name__}: {error.__cause__}")
        skipped_all = result.num_steps == 0 and self.local_settings.local_epochs > 0
        return replace(result, left_out="no_update") if skipped_all else result

    def _train(self, task: ClientTask, download: Download) -> LocalResult:
        sub_model = self.sub_model(download.keep_ratio)
        watch = None if self._participation_checked else GradientWatch(self.algorithm.watched(sub_model.module))
        with self._timed("train"), _blamed(task, "local training"), self._isolated_rng(task):
            for local in sub_model.optimizers:
                local.start_client()
            self.local_settings.recorder.start_client(sub_model.module)
            result = self.local_trainer.train(
                sub_model.module,
                [local.optimizer for local in sub_model.optimizers],
                task,
                self.local_settings,
            )
        if watch is not None and result.num_steps > 0:
            watch.check(self.server)
            self._participation_checked = True
        return result

    def receive(self, task: ClientTask, download: Download, result: LocalResult) -> ClientOutcome:
        """Add the client's update to the round's sums; what cannot be used is left out and said.

        Raises:
            ClientError: If it cannot be used and `Faults` says `Raise`.
        """
        left_out, failure, uplink_bytes, logged = result.left_out, result.failure, 0, {}
        if left_out is None:
            with self._timed("aggregate"), _blamed(task, "aggregation"):
                module = self.sub_model(download.keep_ratio).module
                upload = self.algorithm.collect(self._round, module, task.num_examples)
                uplink_bytes = upload.num_bytes
                if upload.can_be_averaged():
                    self.algorithm.add(self._round, download, upload)
                    logged = self.local_settings.recorder.finish_client()
                else:
                    left_out, failure = "not_finite", _too_large(upload)
        if left_out is not None:
            self._leave_out(task, left_out, failure)
        outcome = ClientOutcome(
            round_idx=task.round_idx,
            client_id=task.client_id,
            keep_ratio=download.keep_ratio,
            num_examples=task.num_examples,
            num_steps=result.num_steps,
            loss=result.loss,
            downlink_bytes=download.num_bytes,
            uplink_bytes=uplink_bytes,
            left_out=left_out,
            logged=logged,
            virtual_seconds=self._fates.of(task.client_id).seconds,
        )
        self._outcomes.append(outcome)
        return outcome

    def close_round(self, round_idx: int) -> RoundSummary:
        """Finish the average: afterwards the server's parameters carry the round's pseudo-gradient.

        All processes call it together and end with the same. If no client is left, and `Faults` allows it, they carry
        none: the server's step then changes nothing.

        Raises:
            ClientError: If a client failed in one of several processes.
            RoundError: If more clients were left out than `Faults` allows; the server's weights are as before the
                round.
        """
        outcomes = self._meet()
        self.faults.check_round(round_idx, outcomes)
        if all(outcome.left_out for outcome in outcomes):
            self.server_moves = True
            _warn_nobody_left(round_idx, outcomes)
        else:
            with self._timed("aggregate"):
                add_up(self.processes, self.algorithm.running_means(self._round))
            self.server_moves = True
            with self._timed("apply"):
                self.algorithm.apply(self.server, self._round)
        diagnostics = dict(self.algorithm.diagnostics(self._round))
        if self.conditions.clock is not None:
            diagnostics["virtual_seconds"] = self._fates.seconds
        self._round = None
        gone = clients_by_reason(outcomes)
        counts = {reason: len(gone.get(reason, ())) for reason in self.faults.reasons(self.conditions)}
        return RoundSummary(round_idx, outcomes, dict(self._seconds), diagnostics, round_means(outcomes), counts)

    def _meet(self) -> tuple[ClientOutcome, ...]:
        """What all processes say of their clients, in the cohort's order; an error everywhere if one failed."""
        failure = None if self._failure is None else str(self._failure)
        said = self.processes.gather((failure, self._outcomes, self._seconds))
        raise_everywhere([failure for failure, *_ in said], self._failure, ClientError)
        self._seconds = {stage: max(seconds[stage] for *_, seconds in said) for stage in STAGES}
        outcomes = [outcome for _, outcomes, _ in said for outcome in outcomes]
        return tuple(sorted(outcomes, key=lambda outcome: self._places[outcome.client_id]))

    def check_server_rests(self) -> None:
        """Raise ``RoundError`` if the server's step began and did not end: its weights are those of no round."""
        if self.server_moves:
            raise RoundError(
                "The server's step was interrupted: its weights belong to no round and are not saved. Resume from the "
                "last checkpoint before."
            )

    def sub_model(self, keep_ratio: float) -> SubModel:
        """The sub-model of one keep ratio, built when its first client comes."""
        if keep_ratio not in self._sub_models:
            self._sub_models[keep_ratio] = self._make_sub_model(keep_ratio, self.local_settings.recorder)
        return self._sub_models[keep_ratio]

    def _keep_ratio(self, client_id: int) -> float:
        return float(self.keep_ratios[client_id])

    def _turn(self, client_id: int, num_examples: int) -> Turn:
        """What a client is asked to do; how large its sub-model is, only for a clock that wants to know."""
        keep_ratio = self._keep_ratio(client_id)
        sizes = (0, 0, 0) if self.conditions.clock is None else self._sub_model_sizes(keep_ratio, client_id)
        return Turn(keep_ratio, num_examples, self.local_settings.local_epochs, *sizes)

    def _sub_model_sizes(self, keep_ratio: float, client_id: int) -> tuple[int, int, int]:
        """Parameters, bytes down and bytes up of the sub-models of one keep ratio: those of any of its clients."""
        if keep_ratio not in self._sizes:
            download = self.algorithm.sample(self._round, keep_ratio, (self.seed, 0, client_id))
            module = self.sub_model(keep_ratio).module
            upload = self.algorithm.collect(self._round, module, num_examples=1)
            num_parameters = sum(parameter.numel() for parameter in module.parameters())
            self._sizes[keep_ratio] = num_parameters, download.num_bytes, upload.num_bytes
        return self._sizes[keep_ratio]

    def _leave_out(self, task: ClientTask, reason: Reason, failure: str) -> None:
        """Go on without a client, and say so unless that was to be expected."""
        what = f"{WHAT_HAPPENED[reason]} ({failure})" if failure else WHAT_HAPPENED[reason]
        if self.faults.ends_run(reason):
            raise ClientError(
                f"Round {task.round_idx}, client {task.client_id}: {what}; to go on without such clients, write "
                f"faults=Faults(on_{reason}=LeaveOut())."
            )
        if reason in ("error", "not_finite", "no_update"):
            warnings.warn(
                f"Round {task.round_idx}: client {task.client_id} is left out of the average: {what}.",
                SpectralWarning,
                stacklevel=4,
            )

    def _isolated_rng(self, task: ClientTask) -> AbstractContextManager[None]:
        """Dropout and augmentation draw from the global generators: seeded per client, restored afterwards."""
        seed = derived_seed(self.seed, "local training", task.round_idx, task.client_id)
        return isolated_rng(seed, [self.local_settings.placement.device])

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with self._profile(stage):
                yield
        finally:
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


def _too_large(upload: Upload) -> str:
    """What is wrong with an upload that is finite and cannot be summed; nothing to add if it is not finite."""
    magnitudes = upload.largest.values()
    return f"it holds values up to {max(magnitudes):.0e}" if all(map(math.isfinite, magnitudes)) else ""


def _warn_nobody_left(round_idx: int, outcomes: Sequence[ClientOutcome]) -> None:
    why = ", ".join(f"{len(ids)} {reason}" for reason, ids in clients_by_reason(outcomes).items())
    warnings.warn(
        f"Round {round_idx}: no client is left to average ({why}); the server's weights are unchanged.",
        SpectralWarning,
        stacklevel=4,
    )
