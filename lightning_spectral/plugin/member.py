"""One model of a federation: its optimizers and their schedules, its engine, and its part of every round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import Known, Moment, ServerHalf, promises_of
from lightning_spectral.algorithms.filter import Filter, Fit, Plan, instructions
from lightning_spectral.arguments import Whole, first_of
from lightning_spectral.client.captured_loop import CapturedLoop
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalLoop, LocalSettings, LocalTrainer, LossLoop, Recorder
from lightning_spectral.client.user_optimizer import (
    check_optimizer,
    check_own_parameters,
    check_still_own,
    options_of,
    trainable_parameters,
    untrained_parameters,
)
from lightning_spectral.errors import warn
from lightning_spectral.filters.own import STATES, STORED, DeviceStates, Stored, chain
from lightning_spectral.participation import Sampler
from lightning_spectral.plugin.callbacks import BatchNormEstimation
from lightning_spectral.plugin.checks import is_absolute, warn_of_other_labels
from lightning_spectral.plugin.processes import alone
from lightning_spectral.plugin.runtime import Shared
from lightning_spectral.plugin.trainer import ClientTrainer, Lookalike, placement_of
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, defines, only_or_all, redirect
from lightning_spectral.protocol.buffer_rules import Rules
from lightning_spectral.protocol.client_store import ClientStore, with_state
from lightning_spectral.protocol.per_client import PerClient
from lightning_spectral.protocol.records import Download, RoundSummary, WorkUnit
from lightning_spectral.server.advice import FirstRounds, suspecting_weights
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.lasting import Kept, Lasting
from lightning_spectral.server.metrics import logged_by_clients, round_metrics
from lightning_spectral.server.optimizers import AVERAGING
from lightning_spectral.server.round import Engine, OpenRound
from lightning_spectral.simulation import Conditions

DECISIONS, BELONGS, ADVICE = "decisions", "belongs to", "advice"  # parts of what lasts, beside those of filters
KEPT = {  # what is said of parts that are dropped
    STATES: "what their devices kept, such as personal parameters and residuals",
    STORED: "their stored updates",
    "algorithm": "the algorithm's sums over all clients",
}
CLIENT_ID = Whole(at_least=0)


class Member(pl.LightningModule):
    """What a `FederatedModule` is to its federation: one model, with its optimizers, its engine and what lasts.

    Round callbacks are called once for each of them.

    Attributes:
        name: Its name in metrics; empty if it is trained alone.
        shared: What it shares with the other models of its federation; set once there is one.
        key: Its name in work units; empty if it is the only one.
        stepper: The server's optimizer; only while fitting.
        templates: The user's own optimizers, which step the parameters of clients while these train; likewise.
        schedules: The user's learning-rate schedules.
        lasting: What it keeps from round to round besides its weights.
        first_rounds: Watches the first rounds for mistakes.
        engine_or_none: The engine, if there is a fit.
    """

    shared: Shared
    module: pl.LightningModule
    algorithm: Algorithm
    state: nn.Module | None
    seed: int
    faults: Faults
    server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    local_epochs: PerClient[int]
    local_steps: PerClient[int] | None
    local_hooks: tuple[LocalHook, ...]
    filters: tuple[Filter, ...]
    buffer_rules: Rules
    conditions: Conditions
    capture: bool

    def __init__(self) -> None:
        super().__init__()
        self.name, self.key, self._last_data = "", "", None
        self.stepper: Optimizer | None = None
        self.templates: list[Optimizer] = []
        self.schedules = RoundSchedules((), "")
        self.first_rounds = FirstRounds()
        self.lasting, self._decisions, self._belongs = Lasting(), Kept(), Kept()
        self.lasting.attach(DECISIONS, self._decisions)
        self.lasting.attach(BELONGS, self._belongs)
        self.lasting.attach(STATES, DeviceStates())
        self.engine_or_none: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the fit."""
        return {**super().__getstate__(), "engine_or_none": None, "stepper": None, "templates": [], "_last_data": None}

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds; exists only while fitting."""
        assert self.engine_or_none is not None, "the engine exists from `on_fit_start` on"
        return self.engine_or_none

    def own_model(self, client_id: int) -> Mapping[str, Tensor]:
        """The values of a client's own model that differ from the server's; none if it has no such model yet.

        With them, `load_state_dict(..., strict=False)` makes a module of the server's the client's own. A server whose
        clients are elsewhere does not have them.

        Raises:
            TypeError, ValueError: If there is no such client.
        """
        num_clients, client_id = self._belongs.values.get("num_clients"), CLIENT_ID("client_id", client_id)
        if num_clients is not None and client_id >= num_clients:
            raise ValueError(f"There is no client {client_id!r}; the last fit had {num_clients}, numbered from 0.")
        download = with_state(Download(WorkUnit(client_id, self.key), 1.0, {}), self.client_states)
        if not download.client_state:
            return {}
        if self.engine_or_none is not None:
            return self.engine_or_none.instructions.own_model(download.client_state)
        decided = self._decisions.values
        half = self.algorithm.bind(self.module, self.state, Known(self.plan().rules(decided), decisions=decided))
        return instructions(half, self.filters).own_model(download.client_state)

    @property
    def client_states(self) -> ClientStore:
        """What the devices of its clients keep, in a simulation, and since when."""
        return cast(DeviceStates, self.lasting.parts[STATES]).store

    def plan(self, **known: Any) -> Plan:
        """What it is made of, with what else is known now."""
        own = self.algorithm, self.filters
        known = {"participation": self.shared.plan.participation, "clock": self.conditions.clock, **known}
        return Plan(self.module, *own, local_hooks=self.local_hooks, buffers=self.buffer_rules, **known)

    @property
    def data(self) -> Any:
        """The data of its clients, a `FederatedDataModule` unless they are elsewhere."""
        return self.shared.plan.data_of(self.name)

    def make_optimizers(self) -> Sequence[LRSchedulerConfig]:
        """Make the server optimizer, and the user's own; return the user's schedules."""
        module, kind = self.module, type(self.module).__name__
        if not defines(module, "configure_optimizers"):
            raise ValueError(
                f"`{kind}.configure_optimizers` is missing; define it and return the optimizer that clients are to "
                "use, e.g. torch.optim.SGD(self.parameters(), lr=0.1)."
            )
        templates, schedulers = read_optimizers(module)
        self.schedules = RoundSchedules(schedulers, self.name)
        for template in templates:
            check_optimizer(template)
            check_own_parameters(template, module, module.configure_optimizers)
        if not (parameters := trainable_parameters(templates)):
            raise ValueError(f"{kind} has no trainable parameter in its optimizer; unfreeze some.")
        parameters += [] if self.state is None else [p for p in self.state.parameters() if p.requires_grad]
        server = (self.server_optimizer or AVERAGING)(parameters)
        if not isinstance(server, Optimizer):
            raise TypeError(f"`server_optimizer` must return a torch optimizer, got {server!r}.")
        if isinstance(server, LBFGS):
            raise ValueError("`server_optimizer` steps once a round, without losses, which LBFGS needs; use another.")
        callbacks = getattr(self.shared.runtime.trainer, "callbacks", ())  # none where a plain loop runs the rounds
        self.algorithm.check(self.plan(optimizers=templates, server_optimizer=server, callbacks=callbacks))
        self.lasting.attach("schedules", self.schedules)
        self.lasting.attach("server optimizer", server)
        self.stepper, self.templates = server, templates
        scheduled = [one.scheduler.optimizer for one in schedulers]  # whose names are those of their schedules
        for template in templates:
            if self.name and template not in scheduled and len(template.param_groups) == 1:
                template.param_groups[0].setdefault("name", self.name)  # for ``LearningRateMonitor``
        return schedulers

    def begin_fit(self, resumed: bool) -> None:
        """Call the user's hook, let the algorithm set the initial weights of a new run, and build the engine."""
        runtime = self.shared.runtime
        if self.name and (trainer := runtime.trainer) is not None:  # a plain loop has none
            # one of several models sees its own optimizers, schedules and data
            wrapped = [one for one in trainer.strategy._lightning_optimizers if one.optimizer in self.templates]
            schedules, strategy = self.schedules.schedulers, Lookalike(trainer.strategy, _lightning_optimizers=wrapped)
            own = {"optimizers": self.templates, "lr_scheduler_configs": schedules, "strategy": strategy}
            self.module.trainer = cast(Any, Lookalike(trainer, datamodule=self.data, **own))
        self.module.on_fit_start()
        untrained = untrained_parameters(self.templates, self.module)
        if not resumed:
            self._drop_what_belongs_elsewhere()
        decided = self._decisions.values if resumed else None
        known = Known(self.plan().rules(decided), untrained, decided)
        half = self.algorithm.bind(self.module, self.state, known)
        if not resumed:
            with suspecting_weights(self.module, 0):
                done = half.initialize(runtime.processes)
            half.settle()
            self._report(*done.splitlines())
        warn_of_other_labels(half, self.data, self.algorithm.capacities.of_clients(self.data.num_clients, self.seed))
        self._decisions.values = half.decisions
        averages_are_set = any(isinstance(each, BatchNormEstimation) for each in runtime.round_callbacks())
        may_rest = averages_are_set or bool(half.advice(Moment.RESTING_AVERAGES))
        self.first_rounds = FirstRounds(runtime.processes.rank == 0, may_rest)
        self.lasting.attach(ADVICE, self.first_rounds)
        if self.local_epochs == 0:
            self._report("local_epochs=0: clients train nothing, so rounds leave the weights as they are.")
        if any(each.interval == "step" for each in self.schedules.schedulers):
            self._report(
                "A learning-rate schedule with interval='step' steps once per round here, not once per local step: "
                "count its warm-up, its `T_max` or its milestones in rounds."
            )
        self.zero_grad()  # of training before this fit: the server has only pseudo-gradients
        first_round = None if resumed else runtime.round_idx  # a second fit of this module may count from 0 again
        filters = [*self.data.filters_beside(self.filters, self.algorithm), *self.filters]
        engine = self.engine_or_none = self._build(self.algorithm, half, filters, self.conditions, first_round)
        for name, end in engine.filters.items():
            self.lasting.attach(name, end)
            self._report(*end.remarks())

    def _drop_what_belongs_elsewhere(self) -> None:
        """Drop what earlier fits have left of other clients, or of tensors that were others, with a warning."""
        parameters, before = self.module.named_parameters(), self._belongs.values
        now = self._belongs.values = {
            "num_clients": self.shared.plan.clients_of(self.name, self.algorithm).num_clients,
            "clients": list(self.data.identity()),
            "tensors": {name: [str(tuple(p.shape)), str(p.dtype), p.requires_grad] for name, p in parameters},
        }
        last_data, self._last_data = self._last_data, self.data
        if not before:
            return
        if last_data is None:  # in another process
            has_others = any(old != new for old, new in zip(before["clients"], now["clients"], strict=False))
        else:
            has_others = not self.data.has_clients_of(last_data)
        were, are = before["tensors"], now["tensors"]
        changed = [name for name in {**are, **were} if were.get(name) != are.get(name)]
        if not (has_others or changed):
            return
        dropped = self.lasting.drop([STATES, STORED])
        self.lasting.attach(STATES, DeviceStates())
        if not promises_of(self.algorithm).clients_may_join and self.state is not None:
            dropped += self.lasting.drop(["algorithm"])
            self.state = cast(nn.Module, self.algorithm.new_state(self.module, self.seed)).to(self.device)
            self.lasting.attach("algorithm", self.state)
        if dropped:
            what = "clients" if has_others else f"parameters ({first_of(changed, 3)})"
            warn(
                f"This fit has other {what} than the one before, so what was kept of clients is dropped: "
                f"{', '.join(KEPT[name] for name in dropped)}. Weights stay as they are. To go on instead, fit the "
                "same parameters on the same data, or resume from a checkpoint."
            )

    def _report(self, *lines: str) -> None:
        for line in lines:
            rank_zero_info(f"{self.name}: {line}" if self.name else line)

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""
        rules = Plan(server, algorithm, self.filters, buffers=self.buffer_rules).rules()
        known = Known(rules, untrained_parameters(self.templates, self.module))
        half = algorithm.bind(server, known=known)
        return self._build(algorithm, half, (), Conditions(), 0)

    def _build(
        self,
        algorithm: Algorithm,
        half: ServerHalf,
        filters: Sequence[Filter],
        conditions: Conditions,
        first_round: int | None,
    ) -> Engine:
        plan, runtime = self.shared.plan, self.shared.runtime
        sampler, clients, store = plan.participation, plan.clients_of(self.name, algorithm), ClientStore()
        figure = sampler.figure if isinstance(sampler, Sampler) else ""
        active = float(getattr(sampler, "active", math.nan))
        told, processes = instructions(half, filters), runtime.processes
        fit = Fit(half, processes, lambda: clients.sizes, figure, active, first_round, clients.batch_sizes)
        ends = chain(filters, fit, store, told.keeps_state)
        for end in ends.values():
            if isinstance(end, Stored):
                end.store.to(self.device)
        known = algorithm, half, told, ends, clients, self.make_executor
        return Engine(
            *known,
            seed=self.seed,
            local_epochs=self.local_epochs,
            local_steps=self.local_steps,
            absolute=is_absolute(sampler),
            model=self.name,
            figure=figure,
            options=lambda: tuple(options_of(template) for template in self.templates),
            faults=self.faults,
            conditions=conditions,
            processes=processes,
            store=store,
            profile=runtime.profile,
            make_measuring=partial(self.make_local_executor, local_trainer=LossLoop) if figure == "loss" else None,
        )

    def make_executor(self, engine: Engine) -> Executor:
        """Create the executor of the rounds' device half: by default clients train one by one, in this process.

        Override this to train them elsewhere, with an `Executor` that takes downloads and returns uploads.
        """
        return self.make_local_executor(engine, CapturedLoop if self.capture else LocalLoop)

    def make_local_executor(self, engine: Engine, local_trainer: LocalTrainer = LocalLoop) -> Executor:
        """Create an executor that trains clients one by one, in this process, unless their data is elsewhere."""
        data = self.data
        if (remote := data.make_executor(self, engine, local_trainer)) is not None:
            return cast(Executor, remote)
        schedules = self.schedules.schedulers  # for clients to read: the rate is constant within a round

        def schedulers() -> Any:  # one function for all turns: `redirect` remembers classes by their functions
            return only_or_all([Lookalike(one.scheduler, step=lambda *_, **__: None) for one in schedules])

        def attach(recorder: Recorder, client: Any) -> None:
            redirect(client, {"log": recorder.log, "lr_schedulers": schedulers})
            adopt_batch_hooks(client, data)
            client.trainer = ClientTrainer(trainer, client, templates, recorder, is_private)

        trainer, told, templates = self.trainer, engine.instructions, self.templates
        is_private = engine.is_private or told.says_nothing
        placement = placement_of(trainer, self.device, self.module, data)
        settings = LocalSettings(placement, self.local_hooks, defines, redirect, alone)
        known = data.client_data, settings, local_trainer, attach, engine.profile
        return SequentialExecutor(Device(engine.half.server, told, templates, *known))

    def open_round(self, round_idx: int, units: Sequence[WorkUnit]) -> OpenRound:
        """Open the round for those that train this model."""
        for template in self.templates:  # again, because hooks can replace layers
            check_still_own(template, self.module)
        opened = self.engine.open_round(round_idx, units)
        self.first_rounds.begin(self.engine.half, opened.algorithm_round, round_idx)
        if round_idx == 0:
            self._report(*self.engine.half.advice(Moment.REMARK, opened.algorithm_round))
        return opened

    def apply_round(self) -> RoundSummary:
        """Turn the round's sums into pseudo-gradients."""
        outcomes = self.engine.round.gathered
        summary = self.engine.apply_round()
        self.first_rounds.end(self.engine.half, summary, outcomes)
        return summary


class RoundSchedules:
    """A model's learning-rate schedules in one fit: they step at the end of a round, or on a metric that it logged.

    Lightning's ``interval="step"`` and ``"epoch"`` both mean a round, of which ``frequency`` pass between two steps.

    Lightning keeps the last value of every metric, so a schedule that waits for one could see an earlier round's value.
    The names of a model's metrics begin with its own, unless it is trained alone.
    """

    def __init__(self, schedulers: Sequence[LRSchedulerConfig], name: str) -> None:
        self.schedulers = schedulers
        self.prefix = f"{name}/" if name else ""
        self._logged: set[str] = set()
        self._outdated: set[str] = set()
        self._rests = False

    def note(self, summary: RoundSummary) -> None:
        """Remember which training metrics are missing in this round."""
        logged = round_metrics(summary).keys() | logged_by_clients(summary).keys()
        self._logged |= logged
        self._outdated = self._logged - logged
        self._rests = not (summary.averaged or summary.is_private)

    def state_dict(self) -> dict[str, Any]:
        """Which training metrics there are, for the checkpoint; Lightning saves the schedulers themselves."""
        return {"logged": sorted(self._logged), "outdated": sorted(self._outdated), "rests": self._rests}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._logged, self._outdated = set(state_dict["logged"]), set(state_dict["outdated"])
        self._rests = state_dict["rests"]

    def _due(self, round_idx: int, *, on_metric: bool) -> list[LRSchedulerConfig]:
        due = [each for each in self.schedulers if (round_idx + 1) % each.frequency == 0]
        return [each for each in due if each.reduce_on_plateau == on_metric]

    def step(self, round_idx: int) -> None:
        """Step at the end of a round, whether or not any client trained this model."""
        for each in self._due(round_idx, on_metric=False):
            _step(each.scheduler)

    def step_on(self, metrics: Mapping[str, Any], round_idx: int) -> None:
        """Step the schedules that wait for a metric, by the names under which the user's module logs.

        A schedule that waits for a training metric skips rounds in which no client is in the average.

        Raises:
            ValueError: If the metric of a strict schedule is missing.
        """
        new = {name: value for name, value in metrics.items() if name not in self._outdated}
        own = {name.removeprefix(self.prefix): value for name, value in new.items() if name.startswith(self.prefix)}
        for each in self._due(round_idx, on_metric=True):
            if each.monitor in own:
                _step(each.scheduler, own[each.monitor])
            elif each.strict and not self._rests:
                raise ValueError(
                    f"{type(each.scheduler).__name__} monitors {each.monitor!r}, which was not logged in round "
                    f"{round_idx}; logged were: {', '.join(sorted(own))}. Log it, validate every round, or set "
                    "'strict': False."
                )


def _step(scheduler: Any, *metric: Any) -> None:
    with warnings.catch_warnings():
        # The optimizer that it schedules is only a template for clients' optimizers and never steps itself.
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        scheduler.step(*metric)


def read_optimizers(module: Any) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read what a module's ``configure_optimizers`` returns, in any of the forms that Lightning knows."""
    configured, owner, several = module.configure_optimizers(), type(module).__name__, not module.automatic_optimization
    if configured is None:
        raise ValueError(f"{owner}.configure_optimizers returned None; return the optimizer that clients use.")
    optimizers, schedulers = _parts(configured)
    right_number = len(optimizers) >= 1 if several else len(optimizers) == 1
    if not right_number or not all(isinstance(optimizer, Optimizer) for optimizer in optimizers):
        number = "torch optimizers" if several else "one torch optimizer"
        more = "; several need manual optimisation: `self.automatic_optimization = False` in its `__init__`"
        raise ValueError(
            f"{owner}.configure_optimizers must return {number}, got {len(optimizers)} "
            f"({', '.join(type(o).__name__ for o in optimizers)}){'' if several else more}."
        )
    schedules = []
    for scheduler, monitor in schedulers:
        if scheduler is not None:
            given = {"monitor": monitor, **(scheduler if isinstance(scheduler, Mapping) else {"scheduler": scheduler})}
            given.setdefault("reduce_on_plateau", isinstance(given.get("scheduler"), ReduceLROnPlateau))
            known = {field.name for field in fields(LRSchedulerConfig)}
            schedules.append(LRSchedulerConfig(**{name: value for name, value in given.items() if name in known}))
            if schedules[-1].reduce_on_plateau and schedules[-1].monitor is None:
                raise ValueError(
                    f"{owner}.configure_optimizers returned a {type(schedules[-1].scheduler).__name__} without the "
                    "metric that it waits for; return {'scheduler': ..., 'monitor': 'val_loss'} in its place."
                )
    return optimizers, schedules


def _parts(configured: Any) -> tuple[list[Any], list[tuple[Any, str | None]]]:
    """Optimizers, and schedulers with the metric that each monitors, if any."""
    several = configured if isinstance(configured, Sequence) else [configured]
    if len(several) == 2 and isinstance(several[0], Sequence):
        schedulers = several[1] if isinstance(several[1], Sequence) else [several[1]]
        return list(several[0]), [(scheduler, None) for scheduler in schedulers]
    each = [one if isinstance(one, Mapping) else {"optimizer": one} for one in several]
    if lacking := [list(one) for one in each if "optimizer" not in one]:
        raise ValueError(f"`configure_optimizers` returned a dictionary without 'optimizer': {lacking[0]}.")
    return [one["optimizer"] for one in each], [(one.get("lr_scheduler"), one.get("monitor")) for one in each]
