"""One round after another in one process: plain torch, told when by callbacks and what by an algorithm."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.errors import ClientError, RoundError, SpectralWarning
from lightning_spectral.federated.local import LocalResult, Placement
from lightning_spectral.federated.local_hooks import LocalHook
from lightning_spectral.federated.local_optimizer import LocalOptimizer
from lightning_spectral.federated.local_trainer import LocalTrainer
from lightning_spectral.federated.participates import GradientWatch
from lightning_spectral.federated.recorder import Recorder
from lightning_spectral.federated.records import ClientOutcome, ClientTask, Cohort, Download, RoundSummary
from lightning_spectral.federated.rng import derived_seed, isolated_rng

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
        self._make_sub_model = make_sub_model
        self._sub_models: dict[float, SubModel] = {}
        self._recorder = Recorder()
        self._seconds: dict[str, float] = {}
        self._outcomes: list[ClientOutcome] = []
        self._round: Any = None
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
            num_examples: Number of examples of each client that takes part, by id.
        """
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._outcomes = []
        with self._timed("refresh"):
            groups: dict[float, list[int]] = defaultdict(list)
            for client_id in sorted(num_examples):
                groups[self._keep_ratio(client_id)].append(client_id)
            members = {ratio: tuple(client_ids) for ratio, client_ids in groups.items()}
            self._round = self.algorithm.refresh(self.server, Cohort(self.seed, round_idx, members, num_examples))

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
        """Add the client's update to the round's sums; an update that is not finite is left out and said."""
        with self._timed("aggregate"), _blamed(task, "aggregation"):
            module = self.sub_model(download.keep_ratio).module
            upload = self.algorithm.collect(self._round, module, task.num_examples)
            left_out = not upload.is_finite()
            if not left_out:
                self.algorithm.add(self._round, download, upload)
                self._recorder.keep_client(task.num_examples)
        if left_out:
            _warn_left_out(task)
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
        )
        self._outcomes.append(outcome)
        return outcome

    def close_round(self, round_idx: int) -> RoundSummary:
        """Finish the average: afterwards the server's parameters carry the round's pseudo-gradient.

        Raises:
            RoundError: If no client's update could be used; the server's weights are as before the round.
        """
        if all(outcome.left_out for outcome in self._outcomes):
            ids = ", ".join(str(outcome.client_id) for outcome in self._outcomes)
            raise RoundError(
                f"Round {round_idx}: no client returned a finite update (clients {ids}); the server's weights are "
                "unchanged. Lower the learning rate, or clip (`clip_tau`), and look at these clients' data."
            )
        with self._timed("apply"):
            self.algorithm.apply(self.server, self._round)
        diagnostics = self.algorithm.diagnostics(self._round)
        self._round = None
        return RoundSummary(
            round_idx, tuple(self._outcomes), dict(self._seconds), diagnostics, self._recorder.finish_round()
        )

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
        where = f"Round {task.round_idx}, client {task.client_id}, {stage}"
        raise ClientError(f"{where}: {type(error).__name__}: {error}") from error


def _warn_left_out(task: ClientTask) -> None:
    warnings.warn(
        f"Round {task.round_idx}: the update of client {task.client_id} is not finite; it is left out of the average.",
        SpectralWarning,
        stacklevel=3,
    )
