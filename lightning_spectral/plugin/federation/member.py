"""One model of a federation: its optimizers, its engine, and its part of every round."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import Moment, ServerHalf
from lightning_spectral.client.local_loop import LossLoop
from lightning_spectral.client.local_optimizer import (
    check_optimizer,
    check_own_parameters,
    options_of,
    trainable_parameters,
    untrained_parameters,
)
from lightning_spectral.client.training_checks import check_still_own
from lightning_spectral.plugin.federation.interfaces import Owner, Plan, Runtime, figure_of, is_absolute
from lightning_spectral.plugin.federation.round_schedules import RoundSchedules
from lightning_spectral.plugin.lightning.schedules import RoundScheduler, name_group, read_optimizers
from lightning_spectral.plugin.lightning.user_hooks import check_configures
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.records import Options, RoundSummary, WorkUnit
from lightning_spectral.server.advice import FirstRounds, suspecting_weights
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.optimizers import AVERAGING
from lightning_spectral.server.round import OpenRound
from lightning_spectral.server.run import Run
from lightning_spectral.simulation import Conditions


class Member:
    """One model of a federation.

    Args:
        owner: The model's module, algorithm and settings.

    Attributes:
        name: The model's name in metrics; empty if it is trained alone.
        key: Its name in work units; empty if it is the only one.
        plan: What was chosen for the federation.
        runtime: Whatever runs the rounds.
        optimizers: The server's, and then the user's own, which step clients; only while fitting.
        schedules: The user's learning-rate schedules.
        store: What the server keeps for single clients.
        frozen_base: Which clients have which frozen tensors.
        decisions: What the algorithm has decided from the initial weights.
        first_rounds: Watches the first rounds for mistakes.
    """

    plan: Plan
    runtime: Runtime

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.name = self.key = ""
        self.optimizers: list[Optimizer] = []
        self.schedules = RoundSchedules((), "")
        self.store, self.frozen_base = ClientStore(), FrozenBase()
        self.decisions: Mapping[str, Any] = {}
        self.first_rounds = FirstRounds()
        self._unreached: list[str] | None = None
        self._engine: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the fit."""
        return {**vars(self), "_engine": None, "optimizers": []}

    def join(self, name: str, key: str, plan: Plan, runtime: Runtime) -> None:
        """Become part of a federation."""
        self.name, self.key, self.plan, self.runtime = name, key, plan, runtime

    @property
    def lightning_module(self) -> pl.LightningModule:
        """The owner as callbacks and loggers know it."""
        return cast(pl.LightningModule, self.owner)

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds; exists only while fitting."""
        assert self._engine is not None, "the engine exists from `on_fit_start` on"
        return self._engine

    @property
    def engine_or_none(self) -> Engine | None:
        """The engine, if there is a fit."""
        return self._engine

    @property
    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which step the parameters of clients while these train."""
        return self.optimizers[1:]

    def make_optimizers(self) -> list[RoundScheduler]:
        """Make the server optimizer, and the user's own; return the user's schedules."""
        owner, module = self.owner, self.owner.module
        check_configures(module)
        configured = module.configure_optimizers()
        templates, schedulers = read_optimizers(
            configured, type(module).__name__, several=not module.automatic_optimization
        )
        self.schedules = RoundSchedules(schedulers, self.name)
        for template in templates:
            check_optimizer(template)
            check_own_parameters(template, module, module.configure_optimizers)
            owner.algorithm.check_optimizer(template, module)
        self.optimizers = [self._server_optimizer(templates), *templates]
        self._name_optimizers()
        return schedulers

    def _server_optimizer(self, templates: Sequence[Optimizer]) -> Optimizer:
        parameters, owner = trainable_parameters(templates), self.owner
        if not parameters:
            raise ValueError(
                f"{type(owner.module).__name__} has no trainable parameter in its optimizer; unfreeze some."
            )
        parameters += [] if owner.state is None else [p for p in owner.state.parameters() if p.requires_grad]
        server = (owner.server_optimizer or AVERAGING)(parameters)
        if not isinstance(server, Optimizer):
            raise TypeError(f"`server_optimizer` must return a torch optimizer, got {server!r}.")
        owner.algorithm.check_server_optimizer(server)
        return server

    def _name_optimizers(self) -> None:
        """Name the optimizers for ``LearningRateMonitor``; a schedule has a name of its own there."""
        name_group(self.optimizers[0], f"{self.name}/server" if self.name else "server")
        scheduled = [scheduler.scheduler.optimizer for scheduler in self.schedules.schedulers]
        for template in self.templates:
            if self.name and template not in scheduled:
                name_group(template, self.name)

    def begin_fit(self, resumed: bool) -> None:
        """Call the user's hook, let the algorithm set the initial weights of a new run, and build the engine."""
        owner, runtime = self.owner, self.runtime
        owner.module.on_fit_start()
        half = self._bind(owner.module, owner.algorithm, owner.state, self.decisions if resumed else None)
        if not resumed:
            self.frozen_base = FrozenBase()
            self._initialize(half)
        self.decisions = half.decisions
        may_rest = half.averages_may_rest or runtime.averages_are_set
        unreached = self._unreached if resumed else None
        self.first_rounds = FirstRounds(runtime.processes.rank == 0, unreached, may_rest)
        owner.zero_grad()  # of training before this fit: the server has only pseudo-gradients
        self._engine = self._build(owner.algorithm, half, owner.conditions, self.store, self.frozen_base)

    def _initialize(self, half: ServerHalf) -> None:
        with suspecting_weights(self.owner.module, 0):
            done = half.initialize(self.runtime.processes)
        half.settle()
        self._say(done.splitlines())

    def _say(self, lines: Sequence[str]) -> None:
        for line in lines:
            rank_zero_info(f"{self.name}: {line}" if self.name else line)

    def _bind(
        self,
        server: pl.LightningModule,
        algorithm: Algorithm,
        state: nn.Module | None = None,
        decisions: Mapping[str, Any] | None = None,
    ) -> ServerHalf:
        """Bind an algorithm to a module, of which the user's optimizers may not train every parameter."""
        untrained = untrained_parameters(self.templates, self.owner.module)
        return algorithm.bind(server, state, untrained=untrained, decisions=decisions)

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""
        return self._build(algorithm, self._bind(server, algorithm), Conditions(), ClientStore(), FrozenBase())

    def _build(
        self,
        algorithm: Algorithm,
        half: ServerHalf,
        conditions: Conditions,
        store: ClientStore,
        frozen_base: FrozenBase,
    ) -> Engine:
        owner, participation = self.owner, self.plan.participation
        store.to(owner.device)
        run = Run(
            algorithm,
            half,
            self.plan.clients_of(self.name, algorithm),
            seed=owner.seed,
            local_epochs=owner.local_epochs,
            absolute=is_absolute(participation),
            model=self.name,
            figure=figure_of(participation),
            options=self._options,
            faults=owner.faults,
            update_bound=owner.update_bound,
            conditions=conditions,
            processes=self.runtime.processes,
            store=store,
            frozen_base=frozen_base,
            profile=self.runtime.profile,
        )
        losses = partial(owner.make_local_executor, run, LossLoop) if run.figure == "loss" else None
        return Engine(run, partial(owner.make_executor, run), losses)

    def _options(self) -> tuple[tuple[Options, ...], ...]:
        return tuple(options_of(template) for template in self.templates)

    def open_round(self, round_idx: int, units: Sequence[WorkUnit]) -> OpenRound:
        """Open the round for those that train this model."""
        for template in self.templates:  # again, because hooks can replace layers
            check_still_own(template, self.owner.module)
        opened = self.engine.open_round(round_idx, units)
        self.first_rounds.begin(opened.opened, round_idx)
        if round_idx == 0:
            self._say(opened.opened.advice(Moment.REMARK))
        return opened

    def apply_round(self) -> RoundSummary:
        """Turn the round's sums into pseudo-gradients."""
        summary = self.engine.apply_round()
        self.first_rounds.end(self.engine.run.half, summary)
        return summary

    def with_learning_rate(self, summary: RoundSummary) -> RoundSummary:
        """A round's summary with the learning rate that clients used in it; NaN if their optimizer chooses its own."""
        rate = self.templates[0].param_groups[0].get("lr")
        return replace(summary, diagnostics={**summary.diagnostics, "lr": math.nan if rate is None else float(rate)})

    def restore(
        self,
        clients: Mapping[tuple[int, str], Mapping[str, torch.Tensor]],
        frozen: Mapping[str, Any],
        unreached: list[str] | None,
        decisions: Mapping[str, Any],
    ) -> None:
        """Restore this model's entries from a checkpoint."""
        self.frozen_base = FrozenBase.from_state_dict(frozen)
        self._unreached, self.decisions = unreached, decisions
        self.store.load_state_dict({key: entry for key, entry in clients.items() if key[1] == self.key})

    def drop_round(self) -> None:
        """End this model's part of a round that failed."""
        if self._engine is not None:
            self._engine.abandon_round()

    def end_fit(self) -> None:
        """Drop what exists only while fitting."""
        self._engine, self.optimizers = None, []
