"""One model of a federation: its engine, its part of every round, and its optimizers among the Trainer's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.capabilities import (
    ChecksOptimizers,
    ChecksServerOptimizer,
    Decides,
    Initializes,
    MayRestAverages,
)
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.optimizer_checks import (
    check_optimizer,
    check_own_parameters,
    check_still_own,
    trainable_parameters,
)
from lightning_spectral.plugin.build_engine import bind, build_engine, sequential_executor
from lightning_spectral.plugin.callbacks import BatchNormEstimation
from lightning_spectral.plugin.client_parallel import processes_of
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.host import Seat, Trained
from lightning_spectral.plugin.round_schedules import RoundSchedules
from lightning_spectral.plugin.schedules import RoundScheduler, name_group, read_optimizers
from lightning_spectral.plugin.server_hooks import ServerHooks
from lightning_spectral.plugin.user_hooks import check_configures
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.server.broken_weights import suspecting_weights
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.first_rounds import FirstRounds
from lightning_spectral.server.optimizers import FedOptimizer
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.round import OpenRound
from lightning_spectral.server.run import Figure, Run
from lightning_spectral.simulation import Conditions

ServerOptimizer = FedOptimizer | Callable[[Iterable[nn.Parameter]], Optimizer]


class Member(ServerHooks, Trained):
    """The part of a single model in a federation of one or several."""

    local_epochs: int
    client_engine: Literal["loop", "trainer"]
    local_hooks: tuple[LocalHook, ...]
    server_optimizer: ServerOptimizer | None
    faults: Faults
    conditions: Conditions
    schedules: RoundSchedules
    seat: Seat
    _store: ClientStore
    _frozen_base: FrozenBase
    _engine: Engine | None
    _first_rounds: FirstRounds
    _unreached: list[str] | None
    _decisions: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The model's name; empty if it is trained alone."""
        return self.seat.name

    @property
    def _federation(self) -> Any:
        """The module that Lightning fits: this one, or one that trains several models."""
        return self if self.seat.federation is None else self.seat.federation

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds; exists only while fitting."""
        assert self._engine is not None, "the engine exists from `on_fit_start` on"
        return self._engine

    @property
    def data(self) -> FederatedDataModule:
        """The data of its clients."""
        return cast(FederatedDataModule, self._federation.data_of(self.name))

    @property
    def processes(self) -> Processes:
        """The processes that train the clients of a round; several with ``strategy="client_parallel"``."""
        return processes_of(self.trainer)

    @property
    def absolute(self) -> bool:
        """Whether coefficients of units are used as they are, rather than divided by their sum."""
        return bool(self._federation.coefficients_are_absolute)

    def clients(self, algorithm: Algorithm) -> ClientDirectory:
        """What is known of its clients, with the capacities that an algorithm gives them."""
        return cast(ClientDirectory, self._federation.clients_of(self.name, algorithm))

    @property
    def figure(self) -> Figure:
        """The norm of updates on which the federation's sampler is based."""
        return cast(Figure, self._federation.sampler_figure)

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value; one of several models logs under its own name."""
        if self.seat.federation is None:
            return super().log(name, value, *args, **options)
        suffix = self.seat.suffix if options.pop("add_dataloader_idx", True) else ""
        options["add_dataloader_idx"] = False
        self.seat.federation.log(f"{self.name}/{name}{suffix}", value, *args, **options)

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which never step: clients' optimizers are modelled on them."""
        first = self.seat.first_optimizer
        return list(self.trainer.strategy.optimizers[first + 1 : first + self.seat.num_optimizers])

    def make_executor(self, run: Run) -> Executor:
        """Create the executor of the rounds' device half: by default clients train one by one, in this process.

        Override this to train them elsewhere, with an `Executor` that takes downloads and returns uploads.
        """
        return sequential_executor(self, run)

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""
        return build_engine(self, algorithm, bind(self, server, algorithm))

    def make_optimizers(self) -> tuple[list[Optimizer], list[RoundScheduler]]:
        """Return the server optimizer with the user's own, on which clients' are modelled, and the user's schedules."""
        several = self.client_engine == "trainer" and not self.module.automatic_optimization
        check_configures(self.module)
        configured = self.module.configure_optimizers()
        templates, schedulers = read_optimizers(configured, type(self.module).__name__, several=several)
        self.schedules = RoundSchedules(schedulers, self.name)
        for template in templates:
            check_optimizer(template)
            check_own_parameters(template, self.module, self.module.configure_optimizers)
            if isinstance(self.algorithm, ChecksOptimizers):
                self.algorithm.check_optimizer(template, self.module)
        self.seat.num_optimizers = 1 + len(templates)
        parameters = self._server_parameters(templates)
        server = SGD(parameters, lr=1.0) if self.server_optimizer is None else self.server_optimizer(parameters)
        if not isinstance(server, Optimizer):
            raise TypeError(f"`server_optimizer` must return a torch optimizer, got {server!r}.")
        if isinstance(self.algorithm, ChecksServerOptimizer):
            self.algorithm.check_server_optimizer(server)
        self._name_optimizers(server, templates)
        return [server, *templates], schedulers

    def _name_optimizers(self, server: Optimizer, templates: Sequence[Optimizer]) -> None:
        """Name the optimizers for ``LearningRateMonitor``; a schedule has a name of its own there."""
        name_group(server, f"{self.name}/server" if self.name else "server")
        scheduled = [scheduler.scheduler.optimizer for scheduler in self.schedules.schedulers]
        for template in templates:
            if self.name and template not in scheduled:
                name_group(template, self.name)

    def _server_parameters(self, templates: Sequence[Optimizer]) -> list[nn.Parameter]:
        parameters = trainable_parameters(templates)
        if not parameters:
            raise ValueError(
                f"{type(self.module).__name__} has no trainable parameter in its optimizer; unfreeze some."
            )
        own = [] if self.state is None else [p for p in self.state.parameters() if p.requires_grad]
        return parameters + own

    def begin_fit(self, resumed: bool) -> None:
        """Call the user's hook, let the algorithm set the initial weights of a new run, and build the engine."""
        self.module.on_fit_start()
        half = bind(self, self.module, self.algorithm, self.state, self._decisions if resumed else None)
        self._decisions = half.decisions if isinstance(half, Decides) else {}
        if not resumed:
            self._frozen_base = FrozenBase()
            self._initialize(half)
        unreached = self._unreached if resumed else None
        self._first_rounds = FirstRounds(self.processes.rank == 0, unreached, self._averages_may_rest(half))
        self.zero_grad()  # of training before this fit: the server has only pseudo-gradients
        kept = self._store, self._frozen_base
        self._engine = build_engine(self, self.algorithm, half, self.conditions, *kept)

    def _averages_may_rest(self, half: ServerHalf) -> bool:
        """Whether running averages may stay unchanged in a round: the algorithm says so, or a callback sets them."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        is_set = any(isinstance(callback, BatchNormEstimation) for callback in callbacks)
        return is_set or (isinstance(half, MayRestAverages) and half.averages_may_rest)

    def _initialize(self, half: ServerHalf) -> None:
        with suspecting_weights(self.module, 0):
            done = half.initialize(self.processes) if isinstance(half, Initializes) else ""
        half.settle()
        for line in done.splitlines():
            rank_zero_info(f"{self.name}: {line}" if self.name else line)

    def open_round(self, round_idx: int, units: Sequence[WorkUnit]) -> OpenRound:
        """Open the round for those that train this model."""
        for template in self.templates():  # again, because hooks can replace layers
            check_still_own(template, self.module)
        opened = self.engine.open_round(round_idx, units)
        self._first_rounds.begin(opened.opened, round_idx)
        return opened

    def apply_round(self) -> RoundSummary:
        """Turn the round's sums into pseudo-gradients."""
        summary = self.engine.apply_round()
        self._first_rounds.end(self.engine.run.half, summary)
        return summary

    def on_train_end(self) -> None:
        """Report what the first rounds have shown, and call the user's hook."""
        self._first_rounds.finish()
        super().on_train_end()

    def settle(self) -> None:
        """Bring the module up to date with the algorithm's state, after the server's step."""
        self.engine.settle()

    def with_learning_rate(self, summary: RoundSummary) -> RoundSummary:
        """A round's summary with the learning rate that clients used in it; NaN if their optimizer chooses its own."""
        rate = self.templates()[0].param_groups[0].get("lr")
        return replace(summary, diagnostics={**summary.diagnostics, "lr": math.nan if rate is None else float(rate)})

    def stored(self) -> dict[tuple[int, str], dict[str, torch.Tensor]]:
        """The state that the server keeps for single clients, for the checkpoint."""
        return self._store.state_dict()

    def frozen(self) -> dict[str, Any]:
        """The record of frozen parameters and of the clients that have them, for the checkpoint."""
        return self._frozen_base.state_dict()

    @property
    def unreached(self) -> list[str] | None:
        """Layers for which no client has had a gradient yet, for the checkpoint of one of the first rounds."""
        return self._first_rounds.unreached

    @property
    def decisions(self) -> Mapping[str, Any]:
        """What the algorithm has decided from the initial weights, for the checkpoint."""
        return self._decisions

    def restore(
        self,
        clients: Mapping[tuple[int, str], Mapping[str, torch.Tensor]],
        frozen: Mapping[str, Any],
        unreached: list[str] | None,
        decisions: Mapping[str, Any],
    ) -> None:
        """Restore this model's entries from a checkpoint."""
        self._frozen_base = FrozenBase.from_state_dict(frozen)
        self._unreached, self._decisions = unreached, decisions
        self._store.load_state_dict({key: entry for key, entry in clients.items() if key[1] == self.seat.key})

    def drop_round(self) -> None:
        """End this model's part of a round that failed."""
        if self._engine is not None:
            self._engine.abandon_round()
