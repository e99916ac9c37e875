"""From a FederatedModule and its Trainer to an engine, and to the sub-models that clients train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.client.local_loop import Placement
from lightning_spectral.client.local_trainer import LocalLoop, LocalTrainer
from lightning_spectral.client.recorder import Recorder, isolate_metrics
from lightning_spectral.plugin.client_trainer import ClientTrainer
from lightning_spectral.plugin.stages import stage_profile
from lightning_spectral.plugin.user_hooks import is_overridden
from lightning_spectral.server.round import Engine, SubModel
from lightning_spectral.simulation import Conditions

if TYPE_CHECKING:
    from lightning_spectral.plugin.module import FederatedModule


def make_engine(
    owner: FederatedModule,
    server: pl.LightningModule,
    algorithm: Algorithm[Any],
    conditions: Conditions | None = None,
) -> Engine:
    """An engine with the clients, the seed and the settings of a run.

    Args:
        owner: The module that a Trainer fits.
        server: The module whose weights are the server's; the user's own, or a copy.
        algorithm: What travels.
        conditions: Under which clients work; ``None`` if all deliver.
    """
    algorithm, local_trainer = algorithm.prepare(server), _local_trainer(owner)
    return Engine(
        server,
        algorithm,
        keep_ratios=algorithm.keep_ratios(owner.data.num_clients, owner.seed),
        make_sub_model=partial(_make_sub_model, owner, algorithm, local_trainer),
        local_trainer=local_trainer,
        local_epochs=owner.local_epochs,
        placement=_placement(owner),
        seed=owner.seed,
        local_hooks=owner.local_hooks,
        profile=partial(stage_profile, owner.trainer),
        processes=owner.processes,
        faults=owner.faults,
        conditions=conditions,
    )


def copy_detached(owner: FederatedModule, make_copy: Callable[[pl.LightningModule], Any]) -> Any:
    """A copy of the user's module; the Trainer is shared, not copied."""
    owner.module.trainer = None
    copied = make_copy(owner.module)
    owner.module.trainer = copied.trainer = owner.trainer
    return copied


def _placement(owner: FederatedModule) -> Placement:
    precision = owner.trainer.precision_plugin
    moves = owner.device.type != "cpu" or is_overridden(owner.module, "transfer_batch_to_device")
    scaler = getattr(precision, "scaler", None)
    return Placement(owner.device, precision.convert_input, precision.train_step_context, moves, scaler)


def _local_trainer(owner: FederatedModule) -> LocalTrainer:
    if owner.client_engine == "loop":
        return LocalLoop()
    return ClientTrainer(owner.trainer, [schedule.scheduler for schedule in owner.schedules])


def _make_sub_model(
    owner: FederatedModule,
    algorithm: Algorithm[Any],
    local_trainer: LocalTrainer,
    keep_ratio: float,
    recorder: Recorder,
) -> SubModel:
    """A copy of the user's module for clients of one keep ratio."""
    client = copy_detached(owner, lambda module: algorithm.build(module, keep_ratio))
    client.log, client.log_dict = recorder.log, recorder.log_dict
    isolate_metrics(client)
    templates = owner.optimizers(use_pl_optimizer=False)[1:]  # type: ignore[index]
    local = tuple(algorithm.local_optimizer(template, owner.module, client) for template in templates)
    local_trainer.adopt(client, [one.optimizer for one in local])
    return SubModel(client, local)
