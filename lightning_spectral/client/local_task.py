"""The interface of local training: its settings, its task, its outcome, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.local_hooks import BeforeStep, LocalHook
from lightning_spectral.client.user_step import Defines, Recorder, defines_all
from lightning_spectral.protocol.records import Download


def set_methods(module: Any, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Put functions in the place of some of a module's methods."""
    vars(module).update(methods)


@dataclass(frozen=True)
class Placement:
    """Where and in which precision local steps run.

    Attributes:
        device: Device of the sub-models.
        convert_batch: Applied to each batch before it is moved, e.g. to convert it to the precision of the weights.
        forward_context: Entered around each forward pass, e.g. autocast.
        moves_batches: Whether batches go through ``transfer_batch_to_device``; not needed for data and module on the
            CPU, unless the user overrides that hook.
        scaler: Every client scales its loss with a copy of it, so that half-precision gradients do not vanish; ``None``
            for no scaling.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    convert_batch: Callable[[Any], Any] = lambda batch: batch
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    moves_batches: bool = True
    scaler: GradScaler | None = None


@dataclass(frozen=True, eq=False)
class LocalSettings:
    """Settings shared by the local training of all clients.

    Attributes:
        placement: Device and precision.
        local_hooks: Hooks that act while a client trains, in this order.
        defines: Whether a module defines a hook itself; hooks that it does not define are not called.
        redirect: Puts functions in the place of some of the module's methods, by name.
    """

    placement: Placement = field(default_factory=Placement)
    local_hooks: tuple[LocalHook, ...] = ()
    defines: Defines = defines_all
    redirect: Callable[[Any, Mapping[str, Callable[..., Any]]], None] = set_methods


@dataclass(frozen=True, eq=False)
class LocalTask:
    """One client's local training.

    Attributes:
        download: What the client was sent; the sub-model is loaded with it.
        data: The client's data.
        recorder: Records what the module logs; needs the size of each batch to weight it.
        before_forward: Called before each ``training_step``; ``None`` for nothing.
        after_forward: Called after each one, before the backward pass of its loss; ``None`` for nothing.
        before_step: For each optimizer, the functions to call in turn before each of its steps.
    """

    download: Download
    data: ClientData
    recorder: Recorder
    before_forward: Callable[[], None] | None = None
    after_forward: Callable[[], None] | None = None
    before_step: Sequence[Sequence[BeforeStep]] = ((),)


@dataclass(frozen=True)
class LocalResult:
    """The outcome of local training.

    Attributes:
        num_steps: Optimizer steps, including those that gradient scaling skips because a gradient overflowed.
        loss: Mean loss per example over all local epochs; NaN if no step was taken.
    """

    num_steps: int
    loss: float


Train = Callable[[LocalTask], LocalResult]
# Maps a new sub-model, its optimizers and the settings to a function that trains it for one client after another. From
# then on the module's own `self.optimizers()` returns these.
LocalTrainer = Callable[[Any, Sequence[Optimizer], LocalSettings], Train]
