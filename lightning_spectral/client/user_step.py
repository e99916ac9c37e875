"""A user's ``training_step``, the hooks around it that the user defined, and what it logs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_spectral.client.metrics import is_metric, metrics_of
from lightning_spectral.protocol.records import LoggedValue

if TYPE_CHECKING:
    from torchmetrics import Metric


Defines = Callable[[Any, str], bool]
OWN_WAYS = ("optimizer_step", "optimizer_zero_grad", "backward", "configure_gradient_clipping")


def defines_all(module: Any, hook: str) -> bool:
    """Treat every hook as defined by the module, so that all of them are called."""
    return True


class UserStep:
    """The hooks of one sub-model, looked up once; those that the user did not define cost nothing.

    Args:
        module: The user's LightningModule.
        defines: Whether the module defines a hook itself.
    """

    def __init__(self, module: Any, defines: Defines = defines_all) -> None:
        def hook(name: str, otherwise: Callable[..., Any] = _nothing) -> Callable[..., Any]:
            return getattr(module, name) if defines(module, name) else otherwise

        self.module = module
        self.num_arguments = num_accepted(module.training_step, 2)
        self.on_train_epoch_start = hook("on_train_epoch_start")
        self.on_train_epoch_end = hook("on_train_epoch_end")
        self.on_train_batch_start = hook("on_train_batch_start")
        self.on_train_batch_end = hook("on_train_batch_end")
        self.takes_outputs = self.on_train_batch_end is not _nothing
        self.on_before_batch_transfer = hook("on_before_batch_transfer", otherwise=_unchanged)
        self.on_after_batch_transfer = hook("on_after_batch_transfer", otherwise=_unchanged)
        self.on_before_zero_grad = hook("on_before_zero_grad")
        self.on_before_backward = hook("on_before_backward")
        self.on_after_backward = hook("on_after_backward")
        self.on_before_optimizer_step = hook("on_before_optimizer_step")
        # what the loop does itself unless the user has another way
        self.optimizer_step, self.optimizer_zero_grad, self.backward, self.configure_gradient_clipping = (
            getattr(module, name) if _has_own_way(module, name) and defines(module, name) else None for name in OWN_WAYS
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the user's step with as many arguments as it takes."""
        return self.module.training_step(*(batch, batch_idx)[: self.num_arguments])


def _has_own_way(module: Any, name: str) -> bool:
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


def batch_outputs(output: Any, loss: Tensor | None) -> dict[str, Any]:
    """The outputs for ``on_train_batch_end``: the step's mapping with its loss detached; empty for a skipped step."""
    if loss is None:
        return {}
    extra = dict(output) if isinstance(output, Mapping) else {}
    return {**extra, "loss": loss.detach()}


def _nothing(*args: Any) -> None:
    """Stand in for a hook that the user did not define."""


def _unchanged(batch: Any, dataloader_idx: int) -> Any:
    return batch


@dataclass
class _Entry:
    total: Tensor
    weight: float
    prog_bar: bool
    logger: bool


class Recorder:
    """Stands in for ``LightningModule.log`` and ``log_dict`` on a client's module.

    Values stay tensors while a client trains, so that nothing waits for the device. ``torchmetrics`` objects are
    computed once, when the client is done.

    Args:
        module: The client's module; its metrics are looked up once.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self.num_examples = 1
        self.metrics = [] if module is None else metrics_of(module)
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
        _accumulate(self._client, name, value, weight, prog_bar, to_logger)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Record several values."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **options)

    def start_client(self) -> None:
        """Clear what the previous client logged, and reset the module's metrics."""
        self._client.clear()
        self._metrics.clear()
        for metric in self.metrics:
            metric.reset()

    def finish_client(self) -> dict[str, LoggedValue]:
        """The means over the client's turn, by name."""
        means = {n: LoggedValue(float(e.total / e.weight), e.prog_bar, e.logger) for n, e in self._client.items()}
        computed = {n: LoggedValue(_scalar(m.compute()).item(), *flags) for n, (m, *flags) in self._metrics.items()}
        return {**means, **computed}


def log_to(recorder: Recorder, module: Any) -> None:
    """Let a module's ``self.log`` and ``self.log_dict`` lead to a recorder."""
    module.log, module.log_dict = recorder.log, recorder.log_dict


def _accumulate(
    entries: dict[str, _Entry], name: str, value: Tensor | float, weight: float, prog_bar: bool, logger: bool
) -> None:
    """Add a weighted value to the running mean of its name."""
    value = _scalar(value)
    if name not in entries:
        entries[name] = _Entry(torch.zeros((), dtype=torch.float64, device=value.device), 0.0, prog_bar, logger)
    entries[name].total.add_(value, alpha=weight)
    entries[name].weight += weight


def _scalar(value: Tensor | float) -> Tensor:
    """The value as a scalar tensor; several values are averaged, as Lightning does."""
    # a Python number keeps its precision even where half precision is the default type
    value = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    return value if value.ndim == 0 else value.float().mean()
