"""One round in Lightning's hooks: who takes part, a client's turn as a training step, the last one closes the round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import lightning.pytorch as pl
import torch

from lightning_spectral.errors import check_is
from lightning_spectral.participation import UniformParticipation
from lightning_spectral.plugin.callbacks.boundaries import Aggregation
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.client_parallel import ClientParallelStrategy
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.host import Slot
from lightning_spectral.plugin.precision import full_precision, scaled_by
from lightning_spectral.plugin.round_log import log_round
from lightning_spectral.plugin.schedules import RoundScheduler
from lightning_spectral.plugin.server_hooks import ServerHooks
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server import scheduling
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.first_rounds import FirstRounds
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.turn import Turn


class RoundHooks(ServerHooks):
    """The training half of a `FederatedModule`: the plan of a round, and what happens from its start to its end."""

    seed: int
    participation: UniformParticipation
    schedulers: list[RoundScheduler]
    _cohort_size: int
    _engine: Engine | None
    _first_rounds: FirstRounds
    _turn: Turn | None
    _default_dtype: torch.dtype
    _finished_round: int
    _stop_after_round: bool

    @property
    def engine(self) -> Engine:
        """What runs the rounds; exists while fitting."""
        assert self._engine is not None, "the engine exists from `on_fit_start` on"
        return self._engine

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]
        check_is("datamodule", datamodule, FederatedDataModule)
        return cast(FederatedDataModule, datamodule)

    @property
    def processes(self) -> Processes:
        """The processes that train the clients of a round; several with ``strategy="client_parallel"``."""
        strategy = self.trainer.strategy
        return strategy.processes if isinstance(strategy, ClientParallelStrategy) else Processes()

    def cut_cohort(self, limit: int | float) -> None:
        """Limit each cohort to a number of clients, or to a share of it: Lightning's ``limit_train_batches``."""
        size = self.participation.clients_per_round
        self._cohort_size = min(size, limit) if isinstance(limit, int) else int(size * limit)
        if limit and not self._cohort_size:
            raise ValueError(f"limit_train_batches={limit} of {size} clients trains none; raise it.")

    def cohort(self, round_idx: int) -> list[WorkUnit]:
        """Who takes part in a round: a pure function of the seed and the round."""
        with stage_profile(self.trainer, "plan"):
            generator = derived_generator(self.seed, "participation", round_idx)
            ids = self.participation.cohort(self.data.num_clients, generator).tolist()[: self._cohort_size]
            sizes = self.data.partition.sizes_of(ids)
        return [WorkUnit(client_id, coefficient=size) for client_id, size in zip(ids, sizes, strict=True)]

    @property
    def num_slots(self) -> int:
        """Positions in every process's schedule of a round: one for each client in a single process."""
        return scheduling.num_slots(self._cohort_size, self.processes.size)

    def schedule(self, round_idx: int) -> list[Slot]:
        """Whom this process trains in a round, in order, and where it idles."""
        units = self.cohort(round_idx)
        if self.processes.size == 1:
            return [Slot(round_idx, unit) for unit in units]
        sizes, ratios = self.num_examples(units), map(self.engine.run.keep_ratio_of, units)
        work = [scheduling.predicted_work(size, ratio) for size, ratio in zip(sizes, ratios, strict=True)]
        slots = scheduling.schedule(units, work, self.processes.size)[self.processes.rank]
        return [Slot(round_idx, unit) for unit in slots]

    def num_examples(self, units: Sequence[WorkUnit]) -> list[int]:
        """Number of training examples of each unit's client."""
        return self.data.partition.sizes_of([unit.client_id for unit in units])

    def start_round(self, round_idx: int) -> None:
        """Open the round for its cohort, and call the round callbacks."""
        units = self.cohort(round_idx)
        sizes = self.num_examples(units)
        opened = self.engine.open_round(round_idx, dict(zip(units, sizes, strict=True)))
        self._first_rounds.begin(self.engine.run.algorithm, opened.opened, round_idx)
        for callback in self._round_callbacks():
            callback.on_round_start(self.trainer, self, opened.opened)

    def send(self, slot: Slot) -> None:
        """Begin a client's turn: draw its download and send it. An idle slot, or one after a failure, has no turn."""
        opened, self._turn = self.engine.round, None
        if slot.unit is not None and opened.failure is None:
            with opened.containing_failures(slot.unit):
                turn = Turn(opened, slot.unit)
                turn.send()
                self._turn = turn

    def training_step(self, batch: Slot, batch_idx: int) -> None:
        """One client's local epochs, then `Aggregation`; after the last client the end of the round."""
        with full_precision(self.device, self._default_dtype):
            if self._turn is not None:
                with self.engine.round.containing_failures(self._turn.unit):
                    self._train(self._turn)
            if self.trainer.is_last_batch:
                for callback in self._round_callbacks():
                    callback.on_cohort_end(self.trainer, self, batch.round_idx)

    def _train(self, turn: Turn) -> None:
        turn.train()
        for callback in self._round_callbacks():
            callback.on_client_end(self.trainer, self, turn)

    def abandon_round(self) -> None:
        """End a round that failed: it has changed nothing at the server, and can be repeated."""
        if self._engine is not None:
            self._engine.abandon_round()

    def finish_round(self) -> None:
        """Close the round, step the server on its pseudo-gradient, step the schedules and log the round."""
        summary = self.engine.close_round()
        self._first_rounds.end(self.module, summary)
        server, local, *_ = self._optimizers()
        with stage_profile(self.trainer, "apply"), scaled_by(None, self.trainer.precision_plugin):
            server.step()
        self.engine.settle()
        self.zero_grad()  # of every parameter, including those of no optimizer
        self._finished_round = summary.round_idx
        summary = replace(summary, diagnostics={**summary.diagnostics, "lr": float(local.param_groups[0]["lr"])})
        for scheduler in self.schedulers:
            if not scheduler.waits_for_metric:
                scheduler.step(summary.round_idx)
        # last, so that a checkpoint written by one of them, or after one failed, holds the whole round
        log_round(self.trainer, summary)
        for callback in self._round_callbacks():
            callback.on_round_end(self.trainer, self, summary)

    def _optimizers(self) -> Sequence[Any]:
        optimizers: Any = self.optimizers()
        return list(optimizers)

    def _round_callbacks(self) -> list[RoundCallback]:
        """The round callbacks in the Trainer's order, then `Aggregation`, which ends what the others observe."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        round_callbacks = [callback for callback in callbacks if isinstance(callback, RoundCallback)]
        return sorted(round_callbacks, key=lambda callback: isinstance(callback, Aggregation))

    def on_train_batch_end(self, outputs: Any, batch: Slot, batch_idx: int) -> None:
        """Postpone a request to stop within a round to its last client.

        Processes stop together, as soon as one of them is asked to. After SIGTERM they end after the current turn.
        """
        self._turn = None
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.end_if_told()
        if self.trainer.is_last_batch:
            stop = self.trainer.should_stop or self._stop_after_round
            self.trainer.should_stop = self.trainer.strategy.reduce_boolean_decision(stop, all=False)
        elif self.trainer.should_stop:
            self.trainer.should_stop, self._stop_after_round = False, True

    def on_train_epoch_end(self) -> None:
        """Step the schedules that wait for a metric, which is available now.

        They skip the round of a checkpoint that was written during validation: metrics are not in checkpoints, and
        Lightning's own plateau schedulers skip that round too.
        """
        for scheduler in self.schedulers:
            if scheduler.waits_for_metric and self._finished_round == self.current_epoch:
                scheduler.step_on(self.trainer.callback_metrics, self.current_epoch)
