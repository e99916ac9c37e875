"""One client's local epochs in a plain loop, by automatic or manual optimisation; or its losses alone, for samplers."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        module: The user's LightningModule, trained in place.
        optimizers: The user's optimizers of its parameters: one, unless the module uses manual optimisation.
        settings: Settings shared by the local training of all clients.
    """

    def __init__(self, module: Any, optimizers: Sequence[Optimizer], settings: LocalSettings) -> None:
        self.module, self.placement = module, settings.placement
        self.user = UserStep(module, settings.defines)
        self.is_manual = not getattr(module, "automatic_optimization", True)
        self.optimizers = [ClientOptimizer(optimizer, self, i) for i, optimizer in enumerate(optimizers)]
        self.before_step: Sequence[Sequence[BeforeStep]] = ()
        self.scaler: GradScaler | None = None
        self.num_steps = 0
        self._redirect = settings.redirect
        self._methods: dict[str, Callable[..., Any]] = {
            "optimizers": self._optimizers,
            "manual_backward": self._manual_backward,
        }
        self._eager = not self.is_manual and self.user.optimizer_step is None and not _needs_closure(optimizers[0])

    def __call__(self, task: LocalTask) -> LocalResult:
        """Train for one client."""
        module, user, recorder, self.before_step = self.module, self.user, task.recorder, task.before_step
        self._redirect(module, self._methods)
        self.scaler = copy.deepcopy(self.placement.scaler)  # no client inherits a scale from another
        self.num_steps = 0
        losses: list[Tensor] = []  # read once, when the client is done
        sizes: list[int] = []
        for local_epoch in range(task.download.local_epochs):
            user.on_train_epoch_start()
            for batch_idx, (batch, size) in enumerate(task.data.epoch(local_epoch)):
                recorder.num_examples = size
                batch = to_device(user, module, self.placement, batch)
                if user.on_train_batch_start(batch, batch_idx) == -1:
                    break
                output, loss = self._step(task, batch, batch_idx)
                if loss is not None:
                    losses.append(loss.detach())
                    sizes.append(size)
                if user.takes_outputs:
                    user.on_train_batch_end(batch_outputs(output, loss), batch, batch_idx)
            user.on_train_epoch_end()
        return LocalResult(self.num_steps if self.is_manual else len(sizes), mean_per_example(losses, sizes))

    def _step(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        """Run the user's step on a batch, and take an optimizer step unless the user's does."""
        if self.is_manual:
            output = self._forward(task, batch, batch_idx)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            return output, loss.mean() if isinstance(loss, Tensor) else None
        if not self._eager:
            return self._step_with_closure(task, batch, batch_idx)
        output = self._forward(task, batch, batch_idx)
        if (loss := loss_of(output)) is not None:
            optimizer = self.optimizers[0].optimizer
            self._zero_grad(optimizer, batch_idx)
            self._scaled_backward(loss)
            self._after_closure(optimizer, self.before_step[0])
            self._take(optimizer)
        return output, loss

    def _step_with_closure(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        """Let the user's `optimizer_step`, or an optimizer that needs it, evaluate the loss, perhaps several times."""
        optimizer = self.optimizers[0]
        evaluated: list[tuple[Any, Tensor | None]] = []

        @torch.enable_grad()  # a step switches gradients off
        def closure() -> Tensor | None:
            output = self._forward(task, batch, batch_idx)
            loss = loss_of(output)
            evaluated.append((output, loss))
            self._zero_grad(optimizer.optimizer, batch_idx)
            if loss is None:
                return None
            self._scaled_backward(loss)
            return loss.detach()

        if self.user.optimizer_step is None:
            optimizer.step(closure)
        else:
            self.user.optimizer_step(self._epoch, batch_idx, optimizer, closure)
        return evaluated[0] if evaluated else ({}, None)

    def _forward(self, task: LocalTask, batch: Any, batch_idx: int) -> Any:
        if task.before_forward is not None:
            task.before_forward()
        with self.placement.forward_context():
            output = self.user.training_step(batch, batch_idx)
        if task.after_forward is not None:
            task.after_forward()
        return output

    def _zero_grad(self, optimizer: Optimizer, batch_idx: int) -> None:
        """Drop the last gradients; Lightning's automatic optimisation does so after the forward pass."""
        self.user.on_before_zero_grad(optimizer)
        if self.user.optimizer_zero_grad is None:
            optimizer.zero_grad()
        else:
            self.user.optimizer_zero_grad(self._epoch, batch_idx, optimizer)

    def _scaled_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        user = self.user
        loss = loss if self.scaler is None else self.scaler.scale(loss)
        user.on_before_backward(loss)
        if user.backward is None:
            loss.backward(*args, **options)  # type: ignore[no-untyped-call]
        else:
            user.backward(loss, *args, **options)
        user.on_after_backward()

    def _after_closure(self, optimizer: Optimizer, before_step: Sequence[BeforeStep]) -> None:
        """What acts on gradients, before a step; there are none if `training_step` returned no loss."""
        has_gradients = self._eager or _has_gradients(optimizer)
        if self.scaler is not None and has_gradients:
            self.scaler.unscale_(optimizer)
        self.user.on_before_optimizer_step(optimizer)
        if self.user.configure_gradient_clipping is not None and not self.is_manual:
            self.user.configure_gradient_clipping(optimizer, None, None)
        for act in before_step if has_gradients else ():
            act()

    @property
    def _epoch(self) -> int:
        return getattr(self.module, "current_epoch", 0)

    def step(self, optimizer: Optimizer, index: int, closure: Callable[[], Any] | None, options: Any) -> Any:
        """Take a step that the user's code asks for."""
        self.num_steps += 1

        def evaluated() -> Any:
            result = None if closure is None else closure()
            self._after_closure(optimizer, self.before_step[index])
            return result

        if closure is not None and self.scaler is None:
            return optimizer.step(evaluated, **options)
        result = evaluated()
        self._take(optimizer, **options)
        return result

    def _take(self, optimizer: Optimizer, **options: Any) -> None:
        if self.scaler is None or not _has_gradients(optimizer):
            optimizer.step(**options)
        else:
            self.scaler.step(optimizer, **options)  # skipped if a gradient overflowed
            self.scaler.update()

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """The user's optimizers, as ``LightningModule.optimizers`` returns them."""
        found: list[Any] = [one if use_pl_optimizer else one.optimizer for one in self.optimizers]
        return found[0] if len(found) == 1 else found

    def _manual_backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        if not self.is_manual:
            raise RuntimeError(
                "`manual_backward` is for manual optimisation: set `self.automatic_optimization = False` in the "
                "module's `__init__`, or return the loss."
            )
        self._scaled_backward(loss, *args, **options)


class ClientOptimizer:
    """The result of ``self.optimizers()`` on a client: the user's optimizer, whose steps are counted and hooked.

    It claims to be of the optimizer's class, as Lightning's wrapper does.
    """

    def __init__(self, optimizer: Optimizer, loop: LocalLoop, index: int) -> None:
        self._optimizer, self._loop, self._index = optimizer, loop, index
        kind: Any = type(f"Client{type(optimizer).__name__}", (ClientOptimizer, type(optimizer)), {})
        self.__class__ = kind

    @property
    def optimizer(self) -> Optimizer:
        """The user's own."""
        return self._optimizer

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Take a step, after a closure if there is one; hooks act once there are gradients."""
        return self._loop.step(self._optimizer, self._index, closure, options)

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Compute gradients of this optimizer's parameters alone within the block."""
        self._loop.module.toggle_optimizer(self)
        yield
        self._loop.module.untoggle_optimizer(self)

    def zero_grad(self, *args: Any, **options: Any) -> None:
        self._optimizer.zero_grad(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_optimizer"], name)


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether a step evaluates the loss by itself, or hooks are to run before that, as they do in Lightning."""
    if vars(optimizer).get("_optimizer_step_pre_hooks"):
        return True
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


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
        module: The user's LightningModule.
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
