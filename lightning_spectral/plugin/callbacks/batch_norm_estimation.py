"""Re-estimates the BatchNorm averages of the server's model over the training data."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_spectral.arguments import Whole
from lightning_spectral.client.kept_state import trying
from lightning_spectral.client.local_loop import Recorder, UserStep, isolate_metrics
from lightning_spectral.errors import RoundError, warn
from lightning_spectral.nn.torch_modules import layers_with_averages
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.processes import processes_of
from lightning_spectral.plugin.trainer import num_rounds
from lightning_spectral.plugin.user_hooks import adopt_batch_hooks, as_host, as_in_a_step, defines, redirect
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import RoundSummary
from lightning_spectral.protocol.rng import derived_seed, isolated_rng
from lightning_spectral.server.fault_policy import LeaveOut

PURPOSE = "BatchNorm estimation"
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormEstimation(RoundCallback):
    """Sets the BatchNorm averages of the server's model to those of its own activations on all training data.

    It acts after the server's step, before anything else sees the round, so validation, `ClientEvaluation` and
    checkpoints use the new averages. Your module runs ``training_step``, without taking steps, on the training
    examples of all clients, reshuffled in every round, in nearly equal batches of at most
    ``FederatedDataModule(eval_batch_size=...)``. What the step logs is discarded. Each layer gets the mean over batches
    of the batch mean and of the unbiased batch variance, as with `torch.optim.swa_utils.update_bn`. Layers in eval
    mode, whose averages clients do not learn either, and layers that ``training_step`` does not call keep theirs.

    The clients' averages are therefore not needed: with the federation's ``buffers={"*.running_*": "server"}`` they are
    not uploaded. The downloaded ones are not used, since training uses the statistics of the batch.

    A batch on which ``training_step`` fails, or which gives NaN, is left out if the run's `Faults` tolerate clients
    with that fault, and a `SpectralWarning` counts them. Dropout is active, as it is while clients train. The global
    random generators are left unchanged. With several processes, one estimates and all get the same bits.

    Args:
        every_n_rounds: Estimate after rounds n - 1, 2n - 1, ..., counted from 0, after which
            ``Trainer(check_val_every_n_epoch=n)`` validates, and after the last round.
        max_batches: Largest number of batches to use; ``None`` for all.

    Raises:
        ValueError: At set-up, if no model has a BatchNorm layer with averages, if a model that has one optimises
            manually, since its ``training_step`` cannot run without taking steps, or if, with ``averages_per_width``,
            no client has the whole width, whose averages are estimated.

    Note:
        The server of a real federation does not have this data; HeteroFL, which evaluates in this way, reads it
        nevertheless. A round costs one forward pass over all of it, about a third of a local epoch of all clients.

    Reference:
        Diao et al. (2021), HeteroFL, section 3: static batch normalization.

    Example:
        >>> callback = BatchNormEstimation(max_batches=50)  # Trainer(callbacks=[callback])
    """

    reads_clients = True
    estimates_averages = True

    def __init__(self, every_n_rounds: int = 1, max_batches: int | None = None) -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        self.max_batches: int | None = Whole(at_least=1, optional=True)("max_batches", max_batches)

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        members = as_host(pl_module, "BatchNormEstimation acts after rounds").members.values()
        if not (found := [member.module for member in members if _tracked(member.module)]):
            raise ValueError(
                "BatchNormEstimation finds no BatchNorm layer with averages, which `track_running_stats=False` and "
                "`use_batch_statistics` remove; leave the callback out."
            )
        if manual := [type(module).__name__ for module in found if not module.automatic_optimization]:
            raise ValueError(
                f"BatchNormEstimation runs `training_step`, which trains in {', '.join(manual)}, under manual "
                "optimisation; leave the callback out."
            )

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: RoundSummary) -> None:
        done, names = summary.round_idx + 1, averages(_tracked(pl_module.module))
        if names and (done % self.every_n_rounds == 0 or done == num_rounds(trainer)):
            (values,) = processes_of(trainer).share_out(
                [self.max_batches], partial(estimated, trainer, pl_module, summary.round_idx), cost=lambda _: 1.0
            )
            load_tensors(pl_module.module, dict(zip(names, values, strict=True)))


def _tracked(module: nn.Module) -> dict[str, _BatchNorm]:
    return {name: layer for name, layer in layers_with_averages(module).items() if isinstance(layer, _BatchNorm)}


def averages(layers: Iterable[str]) -> list[str]:
    """Names of the averages of some BatchNorm layers."""
    return [f"{layer}.{buffer}" if layer else buffer for layer in layers for buffer in BUFFERS]


def estimated(trainer: pl.Trainer, model: Any, round_idx: int, max_batches: int | None) -> tuple[Tensor, ...]:
    """The averages of a model's BatchNorm layers over its training data; the model is only read."""
    module: Any = model.module
    batches = model.data.shuffled_batches(model.seed, (PURPOSE, round_idx), max_batches)
    where, seed = f"Round {round_idx}, {PURPOSE}", derived_seed(model.seed, PURPOSE, round_idx)
    with trying(module):
        recorder = Recorder(module)
        redirect(module, {"log": recorder.log})
        isolate_metrics(recorder.metrics)
        adopt_batch_hooks(module, model.data)
        layers = {name: layer for name, layer in _tracked(module).items() if layer.training}
        for layer in layers.values():
            layer.reset_running_stats()
            layer.momentum = None  # the mean over all batches
        try:
            with isolated_rng(seed, [trainer.strategy.root_device]):  # a step may draw random numbers
                _run_steps(trainer, model, [*layers.values()], batches, where)
        except RoundError:
            raise
        except Exception as error:
            raise RoundError(f"{where}: {type(error).__name__}: {error}") from error
        learned = select_tensors(module, averages(n for n, layer in layers.items() if layer.num_batches_tracked))
    return tuple({**select_tensors(module, averages(_tracked(module))), **learned}.values())


def _run_steps(trainer: pl.Trainer, model: Any, layers: list[_BatchNorm], batches: Iterable[Any], where: str) -> None:
    """Run ``training_step`` on all batches; `RoundError` if one has a fault that the run's `Faults` do not tolerate."""
    user, left_out, count = UserStep(model.module, defines), 0, 0
    user.on_train_epoch_start()
    for count, batch in enumerate(batches, start=1):
        before = [{name: value.clone() for name, value in layer.named_buffers()} for layer in layers]
        try:
            batch = as_in_a_step(batch, model.module, trainer)
            user.on_train_batch_start(batch, count - 1)
            with trainer.precision_plugin.train_step_context():
                user.training_step(batch, count - 1)
        except Exception:
            if model.faults.ends_run("error"):
                raise
        else:
            if all(bool(torch.isfinite(value).all()) for layer in layers for value in layer.buffers()):
                continue
            if model.faults.ends_run("not_finite"):
                raise RoundError(f"{where}: an average becomes NaN or infinite")
        left_out += 1
        for layer, values in zip(layers, before, strict=True):
            load_tensors(layer, values)
    if not left_out:
        return
    shares = [a.max_share for a in (model.faults.on_error, model.faults.on_not_finite) if isinstance(a, LeaveOut)]
    said = f"{where}: {left_out} of {count} batches are left out, whose examples fail or give averages that are NaN"
    if left_out == count or left_out / count > max(shares):
        raise RoundError(
            f"{said}, which is more than `Faults` allow. Batches mix the examples of all clients: look for the broken "
            "ones, or make batches smaller, FederatedDataModule(eval_batch_size=...)."
        )
    warn(f"{said}.")
