"""One client's local epochs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.local_hooks import BeforeStep
from lightning_spectral.client.recorder import Recorder
from lightning_spectral.client.user_step import batch_outputs, loss_of, num_accepted
from lightning_spectral.protocol.exclusion import ExclusionReason


@dataclass(frozen=True)
class Placement:
    """Where and in which precision local steps run.

    Attributes:
        device: Device of the sub-models.
        convert_batch: Applied to each batch before it moves, e.g. to the precision of the weights.
        forward_context: Entered around each forward pass, e.g. autocast.
        moves_batches: Whether batches go through ``transfer_batch_to_device``; data on the CPU for a module on the CPU
            need not, unless the user has a hook of their own.
        scaler: Every client scales its loss with a copy of it, so that half-precision gradients do not vanish; ``None``
            where they do not have to be scaled.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    convert_batch: Callable[[Any], Any] = lambda batch: batch
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    moves_batches: bool = True
    scaler: GradScaler | None = None


@dataclass(frozen=True)
class LocalResult:
    """What local training came to.

    Attributes:
        num_steps: Optimizer steps; one that gradient scaling skips, because a gradient overflowed, counts too.
        loss: Mean loss per example over all local epochs; NaN if no step was taken.
        left_out: Why there is nothing to average; ``None`` if there is.
        failure: What a client raised that is left out for that reason.
    """

    num_steps: int
    loss: float
    left_out: ExclusionReason | None = None
    failure: str = ""


def train_locally(
    module: Any,
    optimizer: Optimizer,
    data: ClientData,
    *,
    local_epochs: int,
    recorder: Recorder,
    placement: Placement,
    before_step: Sequence[BeforeStep] = (),
) -> LocalResult:
    """Run a user's ``training_step`` over one client's data, with the hooks Lightning would call around it.

    Args:
        module: A client's copy of the user's LightningModule; trained in place.
        optimizer: Steps its parameters.
        data: The client's data.
        local_epochs: Passes over the data; 0 trains nothing.
        recorder: Told the size of each batch, so that it can weight what the module logs.
        placement: Device and precision.
        before_step: Called one after another before each step: what local hooks do to the gradients.
    """
    num_arguments = num_accepted(module.training_step, 2)
    scaler = copy.deepcopy(placement.scaler)  # no client inherits a scale from another
    total = torch.zeros((), dtype=torch.float64, device=placement.device)  # read once, when the client is done
    num_steps = num_examples = 0
    for local_epoch in range(local_epochs):
        module.on_train_epoch_start()
        for batch_idx, (batch, size) in enumerate(data.epoch(local_epoch)):
            recorder.num_examples = size
            batch = _to_device(module, batch, placement)
            if module.on_train_batch_start(batch, batch_idx) == -1:
                break
            with placement.forward_context():
                output = module.training_step(*(batch, batch_idx)[:num_arguments])
            loss = loss_of(output)
            if loss is not None:
                _step(module, optimizer, loss, scaler, before_step)
                total.add_(loss.detach().reshape(()), alpha=size)
                num_steps, num_examples = num_steps + 1, num_examples + size
            module.on_train_batch_end(batch_outputs(output, loss), batch, batch_idx)
        module.on_train_epoch_end()
    return LocalResult(num_steps, float(total) / num_examples if num_examples else float("nan"))


def _to_device(module: Any, batch: Any, placement: Placement) -> Any:
    batch = module.on_before_batch_transfer(placement.convert_batch(batch), 0)
    if placement.moves_batches:
        batch = module.transfer_batch_to_device(batch, placement.device, 0)
    return module.on_after_batch_transfer(batch, 0)


def _step(
    module: Any, optimizer: Optimizer, loss: Tensor, scaler: GradScaler | None, before_step: Sequence[BeforeStep]
) -> None:
    """The order of Lightning's automatic optimisation, written out."""
    module.on_before_zero_grad(optimizer)
    optimizer.zero_grad()
    loss = loss if scaler is None else scaler.scale(loss)
    module.on_before_backward(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    module.on_after_backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    module.on_before_optimizer_step(optimizer)
    for act in before_step:
        act()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)  # unless a gradient overflowed: then nothing steps, nor do the optimizer's own hooks run
        scaler.update()
