"""One client's local epochs in a plain loop: the user's step, the hooks around it, and what it logs."""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_spectral.client.batches import ClientData, unchanged
from lightning_spectral.client.kept_state import all_parts
from lightning_spectral.client.local_hooks import BeforeStep, LocalHook
from lightning_spectral.protocol.records import Download, LoggedValue

if TYPE_CHECKING:
    from torchmetrics import Metric

Defines = Callable[[Any, str], bool]
OWN_WAYS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")


class UserStep:
    """The hooks of one sub-model, looked up once; those that the user did not define cost nothing."""

    def __init__(self, module: Any, defines: Defines) -> None:
        def hook(name: str, otherwise: Callable[..., Any] = _nothing) -> Callable[..., Any]:
            return getattr(module, name) if defines(module, name) else otherwise

        self.module = module
        self.num_arguments = num_accepted(module.training_step, 2)
        self.on_train_epoch_start = hook("on_train_epoch_start")
        self.on_train_epoch_end = hook("on_train_epoch_end")
        self.on_train_batch_start = hook("on_train_batch_start")
        self.on_train_batch_end = hook("on_train_batch_end")
        self.takes_outputs = self.on_train_batch_end is not _nothing
        self.on_before_batch_transfer = hook("on_before_batch_transfer", otherwise=unchanged)
        self.on_after_batch_transfer = hook("on_after_batch_transfer", otherwise=unchanged)
        self.on_before_zero_grad = hook("on_before_zero_grad")
        self.on_before_backward = hook("on_before_backward")
        self.on_after_backward = hook("on_after_backward")
        self.on_before_optimizer_step = hook("on_before_optimizer_step")
        # what the loop does itself unless the user has another way
        self.optimizer_step, self.optimizer_zero_grad, self.backward, self.configure_gradient_clipping = (
            getattr(module, name) if has_own_way(module, name) and defines(module, name) else None for name in OWN_WAYS
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the user's step with as many arguments as it takes."""
        return self.module.training_step(*(batch, batch_idx)[: self.num_arguments])


def has_own_way(module: Any, name: str) -> bool:
    """Whether a LightningModule's method among `OWN_WAYS` is not Lightning's own, which needs a Trainer."""
    return hasattr(module, "automatic_optimization") and not getattr(module, name).__module__.startswith("lightning.")


def num_accepted(method: Callable[..., Any], num_offered: int) -> int:
    """Return how many of the offered positional arguments a method takes: users may leave out ``batch_idx``.

    Example:
        >>> num_accepted(lambda batch, *, extra=None: None, 2)
        1
        >>> num_accepted(lambda *args: None, 2)
        2
    """
    parameters = inspect.signature(method).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return num_offered
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(num_offered, sum(parameter.kind in positional for parameter in parameters))


def call_with_accepted(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method with as many leading arguments as it takes."""
    return method(*args[: num_accepted(method, len(args))])


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of ``training_step``: a tensor, a mapping with ``"loss"``, or ``None`` to skip.

    Raises:
        ValueError: If a mapping has no ``"loss"``, or the output is something else.
    """
    if output is None or isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise ValueError(
                f"`training_step` returned a mapping without 'loss' (keys: {', '.join(map(str, output))}); "
                "return the loss under that key, or `None` to skip the step."
            )
        output = output["loss"]
    if not isinstance(output, Tensor):
        raise ValueError(
            f"`training_step` must return a tensor, a mapping with 'loss' or None, got {type(output).__name__}."
        )
    return output


def _nothing(*args: Any) -> None:
    """Stand in for a hook that the user did not define."""


@dataclass
class _Entry:
    total: Tensor
    weight: float
    prog_bar: bool
    logger: bool


class Recorder:
    """Stands in for ``LightningModule.log`` and ``log_dict`` on a client's module, and knows where its training is.

    Values stay tensors while a client trains, so that nothing waits for the device. ``torchmetrics`` objects are
    computed once, when the client is done.

    Attributes:
        task: What the client trains.
        batch: Its current batch, for the message if a step fails.
        batch_idx: The number of this batch in its epoch.
        num_steps: Optimizer steps taken so far.
    """

    def __init__(self, module: nn.Module) -> None:
        self.num_examples = 1
        self.task: LocalTask | None = None
        self.batch: Any = None
        self.batch_idx = self.num_steps = 0
        self.metrics = metrics_of(module)
        self._client: dict[str, _Entry] = {}
        self._metrics: dict[str, tuple[Metric, bool, bool]] = {}

    def log(
        self,
        name: str,
        value: Metric | Tensor | float,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *args: Any,
        batch_size: int | None = None,
        **options: Any,
    ) -> None:
        """Record one value; the other options of ``LightningModule.log`` have no effect on a client."""
        name = f"{name}_epoch" if on_step and on_epoch else name
        to_logger = logger is not False
        if not isinstance(value, Tensor) and is_metric(value):
            self._metrics[name] = (value, prog_bar, to_logger)
            return
        if not isinstance(value, (Tensor, Number)):
            raise TypeError(
                f"`self.log({name!r}, ...)` takes a number, a tensor or a metric of torchmetrics, got {value!r}; log "
                "several values with `self.log_dict`, and print what is not a number."
            )
        weight = float(self.num_examples if batch_size is None else batch_size)
        self.add(name, _scalar(value), weight, prog_bar, to_logger)

    def add(self, name: str, value: Tensor, weight: float, prog_bar: bool, logger: bool) -> None:
        """Add a scalar to the mean of a name."""
        if (entry := self._client.get(name)) is None:
            zero = torch.zeros((), dtype=torch.float64, device=value.device)
            entry = self._client[name] = _Entry(zero, 0.0, prog_bar, logger)
        entry.total.add_(value, alpha=weight)
        entry.weight += weight

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def start_client(self) -> None:
        """Clear what the previous client logged, and reset the module's metrics."""
        self._client.clear()
        self._metrics.clear()
        self.batch = None
        for metric in self.metrics:
            metric.reset()

    def finish_client(self) -> dict[str, LoggedValue]:
        """The means over the client's turn, by name."""
        self.batch = None
        means = {n: LoggedValue(float(e.total / e.weight), e.prog_bar, e.logger) for n, e in self._client.items()}
        computed = {n: LoggedValue(_scalar(m.compute()).item(), *flags) for n, (m, *flags) in self._metrics.items()}
        return {**means, **computed}


def log_to(recorder: Recorder, module: Any) -> None:
    """Redirect a module's ``self.log`` and ``self.log_dict`` to a recorder."""
    module.log, module.log_dict = recorder.log, recorder.log_dict


def _scalar(value: Tensor | float) -> Tensor:
    """The value as a scalar tensor; several values are averaged, as Lightning does."""
    # a Python number keeps its precision even where half precision is the default type
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    return value if value.ndim == 0 else value.float().mean()


def is_metric(value: object) -> TypeGuard[Metric]:
    """Whether a value is a metric of ``torchmetrics``, which a device need not have: until it is imported, none is."""
    return isinstance(value, getattr(sys.modules.get("torchmetrics"), "Metric", ()))


def metrics_of(module: nn.Module) -> list[Metric]:
    """The metrics that a module keeps: parts of it, and those in lists, dictionaries and attributes of plain objects.

    Example:
        >>> from torchmetrics import MeanMetric
        >>> module = nn.Module()
        >>> module.one, module.more = MeanMetric(), {"train": [MeanMetric()]}
        >>> len(metrics_of(module))
        2
    """
    return [part for _, part in all_parts({"": module}) if is_metric(part)]


def isolate_metrics(metrics: Sequence[Metric]) -> None:
    """Keep ``torchmetrics`` from syncing across processes, which train other clients or see the same data."""
    for metric in metrics:
        metric.distributed_available_fn = bool  # which returns False


@dataclass(frozen=True)
class Placement:
    """Where and in which precision local steps run.

    Attributes:
        device: Device of the sub-models.
        convert_batch: Applied to each batch before it is moved, e.g. to convert it to the precision of the weights.
        forward_context: Entered around each forward pass, e.g. autocast.
        moves_batches: Whether batches go through ``transfer_batch_to_device``; not needed for data and module on the
            CPU, unless the user overrides that hook.
        scaler: Each client scales its loss with a copy, so that half-precision gradients do not vanish, or ``None``.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    convert_batch: Callable[[Any], Any] = unchanged
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
        redirect: Replaces some of the module's methods by functions, by name.
        alone: Entered around a client's turn, e.g. to hide other processes from it.
    """

    placement: Placement = field(default_factory=Placement)
    local_hooks: tuple[LocalHook, ...] = ()
    defines: Defines = lambda module, hook: True
    redirect: Callable[[Any, Mapping[str, Callable[..., Any]]], None] = lambda module, by: vars(module).update(by)
    alone: Callable[[], AbstractContextManager[Any]] = nullcontext


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
        epochs: Passes over the client's data, by numbers that decide its examples' order; ``None`` for the download's.
        steps: Batches after which training stops, in the last of them; ``None`` for whole passes.
    """

    download: Download
    data: ClientData
    recorder: Recorder
    before_forward: Callable[[], None] | None = None
    after_forward: Callable[[], None] | None = None
    before_step: Sequence[Sequence[BeforeStep]] = ((),)
    epochs: range | None = None
    steps: int | None = None


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
        self.recorder: Recorder | None = None
        self._redirect = settings.redirect
        self._eager = not self.is_manual and self.user.optimizer_step is None and not _needs_closure(optimizers[0])

    def __call__(self, task: LocalTask) -> LocalResult:
        user, self.recorder, self.before_step = self.user, task.recorder, task.before_step
        recorder = self.recorder
        self._redirect(self.module, {"optimizers": self._optimizers, "manual_backward": self._manual_backward})
        self.scaler = copy.deepcopy(self.placement.scaler)  # no client inherits a scale from another
        recorder.task, recorder.num_steps = task, 0
        losses: list[tuple[Tensor, int]] = []  # of each batch, with its size; read once, when the client is done
        epochs = range(task.download.local_epochs) if task.epochs is None else task.epochs
        for number, local_epoch in enumerate(epochs):
            most = None if task.steps is None else task.steps - number * task.data.num_batches
            user.on_train_epoch_start()
            for batch_idx, (batch, size) in enumerate(islice(self._epoch(task, local_epoch), most)):
                recorder.num_examples, recorder.batch_idx = size, batch_idx
                batch = recorder.batch = self._moved(batch)
                if user.on_train_batch_start(batch, batch_idx) == -1:
                    break
                output, loss = self._step(task, batch, batch_idx)
                if loss is not None:
                    losses.append((loss.detach(), size))
                if user.takes_outputs:
                    extra = output if isinstance(output, Mapping) else {}
                    outputs = {} if loss is None else {**extra, "loss": loss.detach()}
                    user.on_train_batch_end(outputs, batch, batch_idx)
            user.on_train_epoch_end()
        for optimizer in self.optimizers:  # of those without schedules, the weights that they evaluate
            getattr(optimizer.optimizer, "eval", _nothing)()
        return LocalResult(recorder.num_steps if self.is_manual else len(losses), mean_per_example(losses))

    def _epoch(self, task: LocalTask, local_epoch: int) -> Iterator[tuple[Any, int]]:
        """One pass over a client's data: pairs of (batch, number of examples in it)."""
        return task.data.epoch(local_epoch)

    def _moved(self, batch: Any) -> Any:
        """A batch as the user's step gets it."""
        batch = self.user.on_before_batch_transfer(self.placement.convert_batch(batch), 0)
        if self.placement.moves_batches:
            batch = self.module.transfer_batch_to_device(batch, self.placement.device, 0)
        return self.user.on_after_batch_transfer(batch, 0)

    def _step(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        """Run the user's step on a batch, and take an optimizer step unless the user's does."""
        if self.is_manual:
            output = self._forward(task, batch, batch_idx)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            return output, loss.mean() if isinstance(loss, Tensor) else None
        if not self._eager:
            return self._step_with_closure(task, batch, batch_idx)
        output, loss = self._passes(task, batch, batch_idx)
        if loss is not None:
            self.optimizers[0].step()
        return output, loss

    def _passes(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        """The forward pass of the user's step, and the backward pass of its loss unless there is none."""
        output = self._forward(task, batch, batch_idx)
        loss = loss_of(output)
        if loss is not None or not self._eager:  # a closure without a loss leaves no gradients, either
            self._zero_grad(self.optimizers[0].optimizer, batch_idx)
        if loss is not None:
            self._scaled_backward(loss)
        return output, loss

    def _step_with_closure(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        """Let the user's `optimizer_step`, or an optimizer that needs it, evaluate the loss, perhaps several times."""
        optimizer = self.optimizers[0]
        evaluated: list[tuple[Any, Tensor | None]] = []

        @torch.enable_grad()  # a step switches gradients off
        def closure() -> Tensor | None:
            evaluated.append(self._passes(task, batch, batch_idx))
            _, loss = evaluated[-1]
            return None if loss is None else loss.detach()

        if self.user.optimizer_step is None:
            optimizer.step(closure)
        else:
            self.user.optimizer_step(self.module.current_epoch, batch_idx, optimizer, closure)
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
            self.user.optimizer_zero_grad(self.module.current_epoch, batch_idx, optimizer)

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

    def step(self, optimizer: Optimizer, index: int, closure: Callable[[], Any] | None, options: Any) -> Any:
        """Take a step, after a closure if there is one."""
        assert self.recorder is not None, "a client trains"

        def evaluated() -> Any:
            result = None if closure is None else closure()
            self._after_closure(optimizer, self.before_step[index])
            return result

        if closure is not None and self.scaler is None:
            result = optimizer.step(evaluated, **options)
        else:
            result = evaluated()
            if self.scaler is None or not _has_gradients(optimizer):
                optimizer.step(**options)
            else:
                self.scaler.step(optimizer, **options)  # skipped if a gradient overflowed
                self.scaler.update()
        self.recorder.num_steps += 1
        return result

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


def mean_per_example(losses: Sequence[tuple[Tensor, int]]) -> float:
    """Mean of the steps' losses, weighted by their numbers of examples; all losses are read from the device at once."""
    if not losses:
        return math.nan
    values: list[float] = torch.stack([loss if loss.ndim == 0 else loss.reshape(()) for loss, _ in losses]).tolist()
    return sum(value * size for value, (_, size) in zip(values, losses, strict=True)) / sum(size for _, size in losses)


class LossLoop(LocalLoop):
    """Runs a user's ``training_step`` once over the data of one client after another, without backward passes or steps.

    The hooks around batches and epochs are called, and gradients can be asked for; dropout acts as in training.
    """

    def __call__(self, task: LocalTask) -> LocalResult:
        return replace(super().__call__(replace(task, epochs=range(1), steps=None)), num_steps=0)

    def _step(self, task: LocalTask, batch: Any, batch_idx: int) -> tuple[Any, Tensor | None]:
        output = self._forward(task, batch, batch_idx)
        return output, loss_of(output)
