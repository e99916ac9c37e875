"""Who runs a client's local epochs: the contract, and the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from lightning_spectral.client.local_hooks import LocalHook, start_hooks
from lightning_spectral.client.local_loop import LocalResult, Placement, train_locally
from lightning_spectral.client.recorder import Recorder
from lightning_spectral.protocol.records import ClientTask


@dataclass(frozen=True, eq=False)
class LocalSettings:
    """What the local training of all clients has in common.

    Attributes:
        local_epochs: Passes over a client's data; 0 trains nothing.
        recorder: Told the size of each batch, so that it can weight what the module logs.
        placement: Device and precision.
        local_hooks: What acts on the gradients of each optimizer before it steps, in this order.
    """

    local_epochs: int
    recorder: Recorder
    placement: Placement
    local_hooks: tuple[LocalHook, ...] = ()


class LocalTrainer(Protocol):
    """Trains sub-models, each for one client after another."""

    def adopt(self, module: Any, optimizers: Sequence[Optimizer]) -> None:
        """Ready a new sub-model, once: afterwards its ``self.optimizers()`` are these."""

    def train(
        self, module: Any, optimizers: Sequence[Optimizer], task: ClientTask, settings: LocalSettings
    ) -> LocalResult:
        """Run one client's local epochs.

        Args:
            module: A sub-model that was adopted; trained in place.
            optimizers: Step its parameters; their state is fresh.
            task: Whose turn it is.
            settings: What all clients have in common.
        """


class LocalLoop:
    """The plain loop of `federated.local`: one optimizer, automatic optimisation, no Trainer."""

    def adopt(self, module: Any, optimizers: Sequence[Optimizer]) -> None:
        """Let the module find its optimizer."""
        (optimizer,) = optimizers
        module.optimizers = lambda use_pl_optimizer=True: optimizer

    def train(
        self, module: Any, optimizers: Sequence[Optimizer], task: ClientTask, settings: LocalSettings
    ) -> LocalResult:
        """Run one client's local epochs."""
        (optimizer,) = optimizers
        return train_locally(
            module,
            optimizer,
            task.data,
            local_epochs=settings.local_epochs,
            recorder=settings.recorder,
            placement=settings.placement,
            before_step=start_hooks(settings.local_hooks, module, optimizer),
        )
