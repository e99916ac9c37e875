"""Builds the engine of a FederatedModule and its Trainer, and the executor that trains its clients on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalLoop
from lightning_spectral.client.local_optimizer import options_of, recipe_of
from lightning_spectral.client.local_task import LocalSettings, LocalTrainer, Placement
from lightning_spectral.client.loss_loop import LossLoop
from lightning_spectral.client.optimizer_checks import untrained_parameters
from lightning_spectral.client.recorder import Recorder
from lightning_spectral.plugin.client_trainer import ClientTrainer
from lightning_spectral.plugin.data import FederatedDataModule
from lightning_spectral.plugin.host import Trained
from lightning_spectral.plugin.round_schedules import RoundSchedules
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, defines, is_overridden
from lightning_spectral.plugin.user_logging import redirect_logging
from lightning_spectral.protocol.client_store import ClientStore
from lightning_spectral.protocol.frozen_base import FrozenBase
from lightning_spectral.protocol.gradient_hooks import check_functions
from lightning_spectral.protocol.records import Options
from lightning_spectral.server.client_directory import ClientDirectory
from lightning_spectral.server.engine import Engine
from lightning_spectral.server.executor import Executor, SequentialExecutor
from lightning_spectral.server.fault_policy import Faults
from lightning_spectral.server.processes import Processes
from lightning_spectral.server.run import Figure, Run
from lightning_spectral.simulation import Conditions


class Owner(Trained, Protocol):
    """The interface of a `FederatedModule` for building its engine."""

    local_epochs: int
    client_engine: Literal["loop", "trainer"]
    local_hooks: tuple[LocalHook, ...]
    faults: Faults
    schedules: RoundSchedules

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that fits it."""

    @property
    def device(self) -> torch.device:
        """Device of the module."""

    @property
    def data(self) -> FederatedDataModule:
        """The data module of the run."""

    @property
    def processes(self) -> Processes:
        """The processes that train the clients of a round."""

    @property
    def absolute(self) -> bool:
        """Whether coefficients of units are used as they are."""

    def clients(self, algorithm: Algorithm) -> ClientDirectory:
        """What is known of its clients, with the capacities that an algorithm gives them."""

    @property
    def figure(self) -> Figure:
        """The norm of updates on which the sampler is based."""

    def make_executor(self, run: Run) -> Executor:
        """Create the executor that runs the device half of a run's rounds."""


def bind(
    owner: Trained,
    server: pl.LightningModule,
    algorithm: Algorithm,
    state: nn.Module | None = None,
    decisions: Mapping[str, Any] | None = None,
) -> ServerHalf:
    """Bind an algorithm to a module, of which the user's optimizers may not train every parameter.

    Args:
        owner: The module that a Trainer fits.
        server: The module whose weights are the server's; the user's own, or a copy.
        algorithm: The algorithm.
        state: The algorithm's state between rounds.
        decisions: What was decided when the run began, if it is resumed.
    """
    untrained = untrained_parameters(owner.templates(), owner.module)
    return algorithm.bind(server, state, untrained=untrained, decisions=decisions)


def build_engine(
    owner: Owner,
    algorithm: Algorithm,
    half: ServerHalf,
    conditions: Conditions | None = None,
    store: ClientStore | None = None,
    frozen_base: FrozenBase | None = None,
) -> Engine:
    """Build an engine with the clients, the seed and the settings of a run.

    Args:
        owner: The module that a Trainer fits.
        algorithm: The algorithm.
        half: The algorithm, bound to the module whose weights are the server's; the user's own, or a copy.
        conditions: Simulated dropout and device speed; ``None`` if all clients report back.
        store: State that the server keeps for single clients; ``None`` for a new, empty store.
        frozen_base: The frozen parameters that they have already; ``None`` if none.
    """
    check_functions(half.server)
    store = ClientStore() if store is None else store
    store.to(owner.device)
    run = Run(
        algorithm,
        half,
        owner.clients(algorithm),
        seed=owner.seed,
        local_epochs=owner.local_epochs,
        absolute=owner.absolute,
        model=owner.name,
        figure=owner.figure,
        options=partial(_options, owner),
        faults=owner.faults,
        conditions=Conditions() if conditions is None else conditions,
        processes=owner.processes,
        store=store,
        frozen_base=FrozenBase() if frozen_base is None else frozen_base,
        profile=partial(stage_profile, owner.trainer),
    )
    losses = partial(sequential_executor, owner, run, LossLoop) if owner.figure == "loss" else None
    return Engine(run, partial(owner.make_executor, run), losses)


def _options(owner: Owner) -> tuple[tuple[Options, ...], ...]:
    return tuple(options_of(template) for template in owner.templates())


def sequential_executor(owner: Owner, run: Run, local_trainer: LocalTrainer | None = None) -> SequentialExecutor:
    """An executor that trains clients one after another, on a device in this process.

    Args:
        owner: The module that a Trainer fits.
        run: Settings and state shared by its rounds.
        local_trainer: Runs a client's local epochs; ``None`` for the client engine that the owner asks for.
    """
    device = Device(
        run.server,
        run.half.device_half,
        # looked up in the user's module: a copy of it has parameters with the same names
        [recipe_of(template, owner.module) for template in owner.templates()],
        owner.data.client_data,
        LocalSettings(_placement(owner), owner.local_hooks, defines),
        local_trainer or _local_trainer(owner),
        attach=partial(_attach, owner),
        profile=run.profile,
    )
    return SequentialExecutor(device)


def _attach(owner: Owner, recorder: Recorder, client: Any) -> None:
    client.trainer = owner.trainer
    redirect_logging(client, recorder.log, recorder.log_dict)
    adopt_batch_hooks(client, owner.data)


def _placement(owner: Owner) -> Placement:
    precision = owner.trainer.precision_plugin
    own = any(is_overridden(module, "transfer_batch_to_device") for module in (owner.module, owner.data))
    moves = own or owner.device.type != "cpu"
    scaler = getattr(precision, "scaler", None)
    return Placement(owner.device, precision.convert_input, _forward_context(precision), moves, scaler)


def _forward_context(precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """The context of a client's forward pass; none in full precision, since entering one takes time in every step."""
    names = ("train_step_context", "forward_context")
    is_plain = all(getattr(type(precision), name) is getattr(Precision, name) for name in names)
    return nullcontext if is_plain else precision.train_step_context


def _local_trainer(owner: Owner) -> LocalTrainer:
    if owner.client_engine == "loop":
        return LocalLoop
    schedulers: Sequence[Any] = [scheduler.scheduler for scheduler in owner.schedules.schedulers]
    return ClientTrainer(owner.trainer, schedulers).prepare
