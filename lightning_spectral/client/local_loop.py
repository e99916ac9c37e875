"""One client's local epochs in a plain loop, with one optimizer; or its losses alone, for samplers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_spectral.client.local_hooks import BeforeStep
from lightning_spectral.client.local_task import LocalResult, LocalSettings, LocalTask, Placement
from lightning_spectral.client.user_step import UserStep, batch_outputs, loss_of


class LocalLoop:
    """Runs a user's ``training_step`` over the data of one client after another, with the hooks Lightning would call.

    Args:
        module: A copy of the user's LightningModule; trained in place.
        optimizers: A single optimizer, over its parameters.
        settings: Settings shared by the local training of all clients.
    """

    def __init__(self, module: Any, optimizers: Sequence[Optimizer], settings: LocalSettings) -> None:
        (optimizer,) = optimizers
        module.optimizers = lambda use_pl_optimizer=True: optimizer
        self.module, self.optimizer, self.placement = module, optimizer, settings.placement
        self.user = UserStep(module, settings.defines)

    def __call__(self, task: LocalTask) -> LocalResult:
        """Train for one client."""
        user, recorder, (before_step,) = self.user, task.recorder, task.before_step
        scaler = copy.deepcopy(self.placement.scaler)  # no client inherits a scale from another
        losses: list[Tensor] = []  # read once, when the client is done
        sizes: list[int] = []
        for local_epoch in range(task.download.local_epochs):
            user.on_train_epoch_start()
            for batch_idx, (batch, size) in enumerate(task.data.epoch(local_epoch)):
                recorder.num_examples = size
                batch = to_device(user, self.module, self.placement, batch)
                if user.on_train_batch_start(batch, batch_idx) == -1:
                    break
                if task.before_forward is not None:
                    task.before_forward()
                with self.placement.forward_context():
                    output = user.training_step(batch, batch_idx)
                if task.after_forward is not None:
                    task.after_forward()
                loss = loss_of(output)
                if loss is not None:
                    self._step(loss, scaler, before_step)
                    losses.append(loss.detach())
                    sizes.append(size)
                if user.takes_outputs:
                    user.on_train_batch_end(batch_outputs(output, loss), batch, batch_idx)
            user.on_train_epoch_end()
        return LocalResult(len(sizes), mean_per_example(losses, sizes))

    def _step(self, loss: Tensor, scaler: GradScaler | None, before_step: Sequence[BeforeStep]) -> None:
        """Take one step, with hooks in the order of Lightning's automatic optimisation."""
        user, optimizer = self.user, self.optimizer
        user.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        loss = loss if scaler is None else scaler.scale(loss)
        user.on_before_backward(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        user.on_after_backward()
        if scaler is not None:
            scaler.unscale_(optimizer)
        user.on_before_optimizer_step(optimizer)
        for act in before_step:
            act()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)  # skipped if a gradient overflowed: then no hook of the optimizer runs either
            scaler.update()


def to_device(user: UserStep, module: Any, placement: Placement, batch: Any) -> Any:
    """A client's batch as ``training_step`` receives it."""
    batch = user.on_before_batch_transfer(placement.convert_batch(batch), 0)
    if placement.moves_batches:
        batch = module.transfer_batch_to_device(batch, placement.device, 0)
    return user.on_after_batch_transfer(batch, 0)


def mean_per_example(losses: Sequence[Tensor], sizes: Sequence[int]) -> float:
    """Mean of the steps' losses, weighted by their numbers of examples; all losses are read from the device at once."""
    if not losses:
        return math.nan
    values: list[float] = torch.cat([loss.reshape(1) for loss in losses]).tolist()
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


class LossLoop:
    """Runs a user's ``training_step`` once over the data of one client after another, without optimizer steps.

    Dropout acts as in training, and buffers may change; the server never sees them.

    Args:
        module: A copy of the user's LightningModule.
        optimizers: Its optimizers, which do not step.
        settings: Settings shared by the local training of all clients.
    """

    def __init__(self, module: Any, optimizers: Sequence[Optimizer], settings: LocalSettings) -> None:
        self.module, self.placement = module, settings.placement
        self.user = UserStep(module, settings.defines)

    @torch.no_grad()
    def __call__(self, task: LocalTask) -> LocalResult:
        """Evaluate one client's data."""
        losses: list[Tensor] = []
        sizes: list[int] = []
        for batch_idx, (batch, size) in enumerate(task.data.epoch(0)):
            task.recorder.num_examples = size
            batch = to_device(self.user, self.module, self.placement, batch)
            if task.before_forward is not None:
                task.before_forward()
            with self.placement.forward_context():
                loss = loss_of(self.user.training_step(batch, batch_idx))
            if task.after_forward is not None:
                task.after_forward()
            if loss is not None:
                losses.append(loss.detach())
                sizes.append(size)
        return LocalResult(0, mean_per_example(losses, sizes))
