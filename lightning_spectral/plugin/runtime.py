"""How a Trainer runs the rounds of a federation, and what each of its models knows of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

import lightning.pytorch as pl
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer

from lightning_spectral.plugin.callbacks import Aggregation, BatchNormEstimation, RoundHistory, SubmodelSampling
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.logs import log_round
from lightning_spectral.plugin.processes import ClientParallelStrategy, processes_of
from lightning_spectral.plugin.trainer import STAGE
from lightning_spectral.plugin.user_hooks import Host, Share, replaced
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
    def profile(self) -> Profile:
        profiler = self.trainer.profiler  # type: ignore[attr-defined]
        return nullcontext if isinstance(profiler, PassThroughProfiler) else lambda name: profiler.profile(STAGE(name))

    def round_callbacks(self) -> list[RoundCallback]:
        """The round callbacks in the Trainer's order, between those that must come first and `Aggregation`."""
        first = BatchNormEstimation, RoundHistory, SubmodelSampling  # so that others find the round in the history
        ours = [each for each in self.trainer.callbacks if isinstance(each, RoundCallback)]  # type: ignore[attr-defined]
        return sorted(ours, key=lambda each: isinstance(each, Aggregation) - isinstance(each, first))

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
        """Step server optimizers; Lightning counts one step for the round, however many there are."""
        counted = self.trainer.fit_loop.epoch_loop.manual_optimization
        plugin = self.trainer.precision_plugin
        # Lightning must not divide the pseudo-gradient by a scale: only clients scale, with their own
        unscaled = replaced(plugin, scaler=None) if hasattr(plugin, "scaler") else nullcontext()
        with self.profile("apply"), unscaled:
            counted._on_before_step()
            for server in servers:
                self.trainer.strategy.optimizer_step(server, lambda: None)  # gradients exist
            counted._on_after_step()

    def log(self, summaries: Sequence[RoundSummary]) -> None:
        log_round(self.trainer, summaries)


class Shared:
    """What the models of a federation share: what was chosen for all of them, and whatever runs their rounds."""

    plan: Host
    runtime: Runtime
