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
from lightning_spectral.plugin.trainer import STAGE, RoundsAsSteps, RoundStages, unscaled
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
        return (
            nullcontext if isinstance(profiler, PassThroughProfiler) else lambda stage: profiler.profile(STAGE(stage))
        )

    def round_callbacks(self) -> list[RoundCallback]:
        """The round callbacks in the Trainer's order, between those that must come first and `Aggregation`."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        first = BatchNormEstimation | RoundHistory | SubmodelSampling  # so that others find the round in the history

        def place(callback: RoundCallback) -> int:
            return isinstance(callback, Aggregation) - isinstance(callback, first)

        return sorted((each for each in callbacks if isinstance(each, RoundCallback)), key=place)

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
                self._is_stopping |= not strategy.may_begin(self.round_idx, unit)
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
        with self.profile("apply"), unscaled(self.trainer.precision_plugin):
            first.step()
            for server in servers:
                if server is not first.optimizer:
                    self.trainer.strategy.optimizer_step(server, lambda: None)  # gradients exist

    def log(self, summaries: Sequence[RoundSummary]) -> None:
        log_round(self.trainer, summaries)


def check_private(callbacks: Iterable[pl.Callback]) -> None:
    """Refuse, by name, callbacks that would show without noise what privacy hides."""
    for callback in callbacks:
        if getattr(callback, "reads_clients", False) or isinstance(callback, RoundDashboard):
            raise ValueError(
                f"{type(callback).__name__} shows or uses clients' data without noise; leave it out where there is "
                "`privacy`."
            )


def with_boundaries(trainer: pl.Trainer, own: Iterable[pl.Callback]) -> list[pl.Callback]:
    """The callbacks of the user's modules, then those boundaries of a round that the Trainer does not have yet."""
    own = list(own)
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.state.fn == "fit":
        check_callbacks([*callbacks, *own])  # before Lightning refuses some of them with its own messages
    boundaries: list[pl.Callback] = []  # only those with something to do, since Lightning calls all
    if not isinstance(trainer.profiler, PassThroughProfiler):  # type: ignore[attr-defined]
        boundaries.append(RoundStages())
    if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
        boundaries.append(WandbRounds())
    if any(isinstance(each, CommunicationLedger | RoundDashboard) for each in [*callbacks, *own]):
        boundaries.append(RoundHistory())
    boundaries += [RoundLines(), RoundsAsSteps(), SVDRefresh(), SubmodelSampling(), Aggregation()]
    present = tuple(type(b) for b in boundaries if any(isinstance(c, type(b)) for c in callbacks))
    return [*own, *(boundary for boundary in boundaries if not isinstance(boundary, present))]
