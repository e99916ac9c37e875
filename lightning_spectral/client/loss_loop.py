"""Evaluates ``training_step`` on a client's data, without gradients, for samplers that use losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_spectral.client.local_loop import mean_per_example, to_device
from lightning_spectral.client.local_task import LocalResult, LocalSettings, LocalTask
from lightning_spectral.client.user_step import UserStep, loss_of


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
