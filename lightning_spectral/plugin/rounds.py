"""A Trainer as what runs a federation's rounds: its callbacks, processes, precision, profiler and loggers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from lightning_spectral.plugin.callbacks import (
    Aggregation,
    BatchNormEstimation,
    CommunicationLedger,
    RoundDashboard,
    RoundHistory,
    RoundLines,
    SubmodelSampling,
    SVDRefresh,
    WandbRounds,
)
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.checks import check_callbacks
from lightning_spectral.plugin.host import Share
from lightning_spectral.plugin.logs import log_round
from lightning_spectral.plugin.processes import ClientParallelStrategy, processes_of
from lightning_spectral.plugin.trainer import RoundsAsSteps, RoundStages, action_name, scaled_by
from lightning_spectral.protocol.records import Profile, RoundSummary, WorkUnit
from lightning_spectral.server.processes import Processes


class Runtime:
    """Runs a federation's rounds with the Trainer that fits a module."""

    def __init__(self, host: pl.LightningModule) -> None:
        self._host = host
        self._is_stopping = False

    @property
    def trainer(self) -> pl.Trainer:
        return self._host.trainer

    @property
    def round_idx(self) -> int:
        return self._host.current_epoch

    @property
    def processes(self) -> Processes:
        return processes_of(self.trainer)

    @property
    def averages_are_set(self) -> bool:
        return any(isinstance(callback, BatchNormEstimation) for callback in self.round_callbacks())

    @property
    def profile(self) -> Profile:
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        return nullcontext if _is_absent(profiler) else lambda stage: profiler.profile(action_name(stage))

    def round_callbacks(self) -> list[RoundCallback]:
        """The round callbacks in the Trainer's order, between those that must come first and `Aggregation`."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return sorted((each for each in callbacks if isinstance(each, RoundCallback)), key=_place)

    def begin(self) -> None:
        self._is_stopping = False

    def note_shares(self, round_idx: int, share: Share | None = None) -> None:
        """Let the other processes know what this one does until they meet, for the error if one does not arrive."""
        if isinstance(self.trainer.strategy, ClientParallelStrategy):
            self.trainer.strategy.note_shares(round_idx, () if share is None else share.everywhere)

    def until_stopped(self, units: Iterable[WorkUnit]) -> Iterator[WorkUnit]:
        """Yield the units whose turns may begin: none once this process, or another, was asked to stop."""
        strategy = self.trainer.strategy
        for unit in units:
            if isinstance(strategy, ClientParallelStrategy):
                strategy.note_turn(self.round_idx, unit)
                self._is_stopping |= strategy.must_stop()
            else:
                self._is_stopping |= self.trainer.received_sigterm
            if self._is_stopping:
                return
            yield unit

    def stop_if_signalled(self) -> None:
        """End all processes, as Lightning does for SIGTERM, if any was asked to before its clients were done."""
        if self.trainer.strategy.reduce_boolean_decision(self._is_stopping, all=False):
            self.trainer._signal_connector.received_sigterm = True
            raise SIGTERMException

    def step(self, servers: Sequence[Optimizer]) -> None:
        """Step server optimizers; Lightning counts only the first optimizer's step, for the round.

        That optimizer steps in every round; without a gradient, the step changes nothing.
        """
        first: Any = self._host.optimizers()[0]  # type: ignore[index]
        with self.profile("apply"), scaled_by(None, self.trainer.precision_plugin):
            first.step()
            for server in servers:
                if server is not first.optimizer:
                    self.trainer.strategy.optimizer_step(server, _nothing)

    def log(self, summaries: Sequence[RoundSummary]) -> None:
        log_round(self.trainer, summaries)


def _is_absent(profiler: object) -> bool:
    return isinstance(profiler, PassThroughProfiler)


def _place(callback: RoundCallback) -> int:
    """Whether a callback comes first, in the middle or last among the round callbacks."""
    first = BatchNormEstimation | RoundHistory | SubmodelSampling  # so that others find the round in the history
    return isinstance(callback, Aggregation) - isinstance(callback, first)


def _nothing() -> None:
    """The closure for an optimizer whose gradients already exist."""


def with_boundaries(trainer: pl.Trainer, own: Iterable[pl.Callback]) -> list[pl.Callback]:
    """The callbacks of the user's modules, then those boundaries of a round that the Trainer does not have yet."""
    own = list(own)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.state.fn == "fit":
        check_callbacks([*callbacks, *own])  # before Lightning refuses some of them with its own messages
    reads = CommunicationLedger | RoundDashboard
    history = [RoundHistory()] if any(isinstance(each, reads) for each in [*callbacks, *own]) else []
    boundaries = [
        *_watchers(trainer),
        *history,
        RoundLines(),
        RoundsAsSteps(),
        SVDRefresh(),
        SubmodelSampling(),
        Aggregation(),
    ]
    present = tuple(type(b) for b in boundaries if any(isinstance(c, type(b)) for c in callbacks))
    return [*own, *(boundary for boundary in boundaries if not isinstance(boundary, present))]


def _watchers(trainer: pl.Trainer) -> list[pl.Callback]:
    """Callbacks for this Trainer's profiler and loggers: only those with something to do, since Lightning calls all."""
    profiled = not _is_absent(trainer.profiler)  # type: ignore[attr-defined]
    at_wandb = any(isinstance(logger, WandbLogger) for logger in trainer.loggers)
    return [*([RoundStages()] if profiled else []), *([WandbRounds()] if at_wandb else [])]
