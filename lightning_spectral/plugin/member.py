"""One model of a federation: its optimizers and their schedules, its engine, and its part of every round."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import Moment, ServerHalf
from lightning_spectral.client.device import Device
from lightning_spectral.client.forms import (
    check_optimizer,
    check_own_parameters,
    check_still_own,
    options_of,
    trainable_parameters,
    untrained_parameters,
)
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalLoop, LocalSettings, LocalTrainer, LossLoop, Recorder
from lightning_spectral.participation import Sampler
from lightning_spectral.plugin.checks import is_absolute
from lightning_spectral.plugin.trainer import Instead, placement_of
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, defines, only_or_all, redirect
from lightning_spectral.protocol.client_store import ClientStore, with_state
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.records import Download, RoundSummary, WorkUnit
from lightning_spectral.server.advice import FirstRounds, suspecting_weights
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.fault_policy import Faults, UpdateBound
from lightning_spectral.server.metrics import logged_by_clients, round_metrics
from lightning_spectral.server.optimizers import AVERAGING
from lightning_spectral.server.privacy import ClientPrivacy, PrivateFit, Rounds
from lightning_spectral.server.round import Engine, OpenRound
from lightning_spectral.server.secure_sums import SecureSums
from lightning_spectral.simulation import Conditions


class Member(pl.LightningModule):
    """What a `FederatedModule` is to its federation: one model, with its optimizers, its engine and what lasts.

    Round callbacks are called once for each of them.

    Attributes:
        name: Its name in metrics; empty if it is trained alone.
        part_of: The federation that it is part of, perhaps with other models.
        key: Its name in work units; empty if it is the only one.
        made_optimizers: The server's, and then the user's own, which step clients; only while fitting.
        schedules: The user's learning-rate schedules.
        store: What the server keeps for single clients.
        client_states: What their devices keep, in a simulation, and since when.
        frozen_base: Which clients have which frozen tensors.
        decisions: What the algorithm has decided from the initial weights.
        usual_update: `Engine.usual_update` of its last round.
        adapted_clip: The bound on clients' changes in the next private round, if it is adapted.
        private_rounds: The private rounds so far, with what their epsilon depends on.
        first_rounds: Watches the first rounds for mistakes.
        unreached: The layers that no client had reached when a resumed run was saved; ``None`` if that is settled.
        engine_or_none: The engine, if there is a fit.
    """

    part_of: Any
    module: pl.LightningModule
    algorithm: Algorithm
    state: nn.Module | None
    seed: int
    faults: Faults
    server_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None
    local_epochs: int
    local_hooks: tuple[LocalHook, ...]
    update_bound: UpdateBound | None
    secure_sums: SecureSums | None
    privacy: ClientPrivacy | None
    conditions: Conditions

    def __init__(self) -> None:
        super().__init__()
        self.name = self.key = ""
        self.made_optimizers: list[Optimizer] = []
        self.schedules = RoundSchedules((), "")
        self.store, self.client_states, self.frozen_base = ClientStore(), ClientStore(), FrozenBase()
        self.decisions: Mapping[str, Any] = {}
        self.usual_update = math.nan
        self.adapted_clip: float | None = None
        self.private_rounds: list[Rounds] = []
        self.first_rounds = FirstRounds()
        self.unreached: list[str] | None = None
        self.engine_or_none: Engine | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no part in the fit."""
        return {**super().__getstate__(), "engine_or_none": None, "made_optimizers": []}

    @property
    def engine(self) -> Engine:
        """The engine that runs its rounds; exists only while fitting."""
        assert self.engine_or_none is not None, "the engine exists from `on_fit_start` on"
        return self.engine_or_none

    def own_model(self, client_id: int) -> Mapping[str, Tensor]:
        """The values of a client's own model that differ from the server's; none if it has no such model.

        With them, `load_state_dict(..., strict=False)` makes a module of the server's the client's own. A server whose
        clients are elsewhere does not have them.
        """
        download = with_state(Download(WorkUnit(client_id, self.key), 1.0, {}), self.client_states)
        if not download.client_state:
            return {}
        engine = self.engine_or_none
        half = self.algorithm.bind(self.module, decisions=self.decisions) if engine is None else engine.half
        return half.device_half.own_model(download.client_state)

    @property
    def data(self) -> Any:
        """The data of its clients, a `FederatedDataModule` unless they are elsewhere."""
        return self.part_of.plan.data_of(self.name)

    def templates(self) -> list[Optimizer]:
        """The user's own optimizers, which step the parameters of clients while these train."""
        return self.made_optimizers[1:]

    def make_optimizers(self) -> Sequence[LRSchedulerConfig]:
        """Make the server optimizer, and the user's own; return the user's schedules."""
        module, kind = self.module, type(self.module).__name__
        if not defines(module, "configure_optimizers"):
            raise ValueError(
                f"`{kind}.configure_optimizers` is missing; define it and return the optimizer that clients are to "
                "use, e.g. torch.optim.SGD(self.parameters(), lr=0.1)."
            )
        configured = module.configure_optimizers()
        templates, schedulers = read_optimizers(configured, kind, several=not module.automatic_optimization)
        self.schedules = RoundSchedules(schedulers, self.name)
        for template in templates:
            check_optimizer(template)
            check_own_parameters(template, module, module.configure_optimizers)
            self.algorithm.check_optimizer(template, module)
        if not (parameters := trainable_parameters(templates)):
            raise ValueError(f"{kind} has no trainable parameter in its optimizer; unfreeze some.")
        parameters += [] if self.state is None else [p for p in self.state.parameters() if p.requires_grad]
        server = (self.server_optimizer or AVERAGING)(parameters)
        if not isinstance(server, Optimizer):
            raise TypeError(f"`server_optimizer` must return a torch optimizer, got {server!r}.")
        self.algorithm.check_server_optimizer(server)
        self.made_optimizers = [server, *templates]
        _name_group(server, f"{self.name}/server" if self.name else "server")
        scheduled = [one.scheduler.optimizer for one in schedulers]  # whose names are those of their schedules
        for template in templates:
            if self.name and template not in scheduled:
                _name_group(template, self.name)
        return schedulers

    def begin_fit(self, resumed: bool) -> None:
        """Call the user's hook, let the algorithm set the initial weights of a new run, and build the engine."""
        runtime = self.part_of.runtime
        self.module.on_fit_start()
        untrained = untrained_parameters(self.templates(), self.module)
        decided = self.decisions if resumed else None
        half = self.algorithm.bind(self.module, self.state, untrained=untrained, decisions=decided)
        if not resumed:
            self.frozen_base, self.usual_update, self.adapted_clip = FrozenBase(), math.nan, None
            with suspecting_weights(self.module, 0):
                done = half.initialize(runtime.processes)
            half.settle()
            self._report(done.splitlines())
        self.decisions = half.decisions
        if self.secure_sums is not None and (limits := sorted(half.buffers.limits)):
            raise ValueError(
                f"Secure sums cannot hide smallest and largest values, which {', '.join(limits)} would follow; give "
                "them another rule: FedAvg(buffers={...: 'server'})."
            )
        may_rest = half.averages_may_rest or runtime.averages_are_set
        self.first_rounds = FirstRounds(runtime.processes.rank == 0, self.unreached if resumed else None, may_rest)
        self._report(self._remarks())
        self.zero_grad()  # of training before this fit: the server has only pseudo-gradients
        self.engine_or_none = self._build(
            self.algorithm, half, self.conditions, (self.store, self.client_states), self.frozen_base
        )
        self.engine.usual_update = self.usual_update
        if self.privacy is not None:
            self.privacy.check_buffers(half.buffers)
            self.privacy.check_attributes(self.module)
            active, num_clients = self.part_of.plan.participation.active, int(self.engine.clients.sizes.count_nonzero())
            first = None if resumed else runtime.round_idx  # a second fit of this module may count from 0 again
            rounds = self.private_rounds, first
            self.engine.privacy = PrivateFit(self.privacy, active, num_clients, self.adapted_clip, *rounds)
            self._report([str(self.engine.privacy)])

    def _remarks(self) -> Iterator[str]:
        """What is allowed, and may still not be meant."""
        if self.local_epochs == 0:
            yield "local_epochs=0: clients train nothing, so rounds leave the weights as they are."
        if self.secure_sums is not None:
            yield (
                "secure_sums: updates are masked, and clients keep their losses and what they log: there is no "
                "`fl/loss`, and no update is bounded."
            )
        if any(each.interval == "step" for each in self.schedules.schedulers):
            yield (
                "A learning-rate schedule with interval='step' steps once per round here, not once per local step: "
                "count its warm-up, its `T_max` or its milestones in rounds."
            )

    def _report(self, lines: Iterable[str]) -> None:
        for line in lines:
            rank_zero_info(f"{self.name}: {line}" if self.name else line)

    def build_engine(self, server: pl.LightningModule, algorithm: Algorithm) -> Engine:
        """Build another engine with the clients, the seed and the settings of the run; all clients report back."""
        half = algorithm.bind(server, untrained=untrained_parameters(self.templates(), self.module))
        return self._build(algorithm, half, Conditions(), (ClientStore(), ClientStore()), FrozenBase())

    def _build(
        self,
        algorithm: Algorithm,
        half: ServerHalf,
        conditions: Conditions,
        stores: tuple[ClientStore, ClientStore],
        frozen_base: FrozenBase,
    ) -> Engine:
        plan, runtime = self.part_of.plan, self.part_of.runtime
        sampler = plan.participation
        for store in stores:
            store.to(self.device)
        figure = sampler.figure if isinstance(sampler, Sampler) else ""
        return Engine(
            algorithm,
            half,
            plan.clients_of(self.name, algorithm),
            self.make_executor,
            seed=self.seed,
            local_epochs=self.local_epochs,
            absolute=is_absolute(sampler),
            model=self.name,
            figure=figure,
            options=lambda: tuple(options_of(template) for template in self.templates()),
            faults=self.faults,
            update_bound=self.update_bound,
            secure_sums=self.secure_sums,
            conditions=conditions,
            processes=runtime.processes,
            store=stores[0],
            client_states=stores[1],
            frozen_base=frozen_base,
            profile=runtime.profile,
            make_measuring=partial(self.make_local_executor, local_trainer=LossLoop) if figure == "loss" else None,
        )

    def make_executor(self, engine: Engine) -> Executor:
        """Create the executor of the rounds' device half: by default clients train one by one, in this process.

        Override this to train them elsewhere, with an `Executor` that takes downloads and returns uploads.
        """
        return self.make_local_executor(engine)

    def make_local_executor(self, engine: Engine, local_trainer: LocalTrainer = LocalLoop) -> Executor:
        """Create an executor that trains clients one by one, in this process, unless their data is elsewhere."""
        data = self.data
        if (remote := data.make_executor(self, engine, local_trainer)) is not None:
            return cast(Executor, remote)
        schedules = self.schedules.schedulers  # for clients to read: the rate is constant within a round

        def schedulers() -> Any:  # one function for all turns: `redirect` remembers classes by their functions
            return only_or_all([Instead(one.scheduler, step=lambda *_, **__: None) for one in schedules])

        def attach(recorder: Recorder, client: Any) -> None:
            redirect(client, {"log": recorder.log, "log_dict": recorder.log_dict, "lr_schedulers": schedulers})
            adopt_batch_hooks(client, data)

        placement = placement_of(self.trainer, self.device, self.module, data)
        settings = LocalSettings(placement, self.local_hooks, defines, redirect)
        half, templates = engine.half.device_half, self.templates()
        device = Device(
            engine.server, half, templates, data.client_data, settings, local_trainer, attach, engine.profile
        )
        return SequentialExecutor(device)

    def open_round(self, round_idx: int, units: Sequence[WorkUnit]) -> OpenRound:
        """Open the round for those that train this model."""
        for template in self.templates():  # again, because hooks can replace layers
            check_still_own(template, self.module)
        opened = self.engine.open_round(round_idx, units)
        self.first_rounds.begin(opened.opened, round_idx)
        if round_idx == 0:
            self._report(opened.opened.advice(Moment.REMARK))
        return opened

    def apply_round(self) -> RoundSummary:
        """Turn the round's sums into pseudo-gradients."""
        outcomes = self.engine.round.gathered
        summary = self.engine.apply_round()
        self.usual_update = self.engine.usual_update
        if self.engine.privacy is not None:
            self.adapted_clip = self.engine.privacy.clip
            self.private_rounds = self.engine.privacy.rounds(summary.round_idx + 1)
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
        """Restore what is known about training metrics."""
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


def read_optimizers(
    configured: Any, owner: str, *, several: bool = False
) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """Read what the ``configure_optimizers`` of a class returned, in any of the forms that Lightning knows."""
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


def _name_group(optimizer: Optimizer, name: str) -> None:
    """Name an optimizer's only parameter group for ``LearningRateMonitor``, unless it has a name."""
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups[0].setdefault("name", name)


def _parts(configured: Any) -> tuple[list[Any], list[tuple[Any, str | None]]]:
    """Optimizers, and schedulers with the metric that each monitors, if any."""
    if isinstance(configured, Mapping):
        if "optimizer" not in configured:
            raise ValueError(f"`configure_optimizers` returned a dictionary without 'optimizer': {list(configured)}.")
        return [configured["optimizer"]], [(configured.get("lr_scheduler"), configured.get("monitor"))]
    if not isinstance(configured, Sequence):
        return [configured], []
    if configured and all(isinstance(one, Mapping) for one in configured):
        parts = [_parts(one) for one in configured]
        return [o for optimizers, _ in parts for o in optimizers], [s for _, schedulers in parts for s in schedulers]
    if len(configured) == 2 and isinstance(configured[0], Sequence):
        schedulers = configured[1] if isinstance(configured[1], Sequence) else [configured[1]]
        return list(configured[0]), [(scheduler, None) for scheduler in schedulers]
    return list(configured), []
