"""A user's ``training_step``, and the hooks around it that the user defined."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Defines = Callable[[Any, str], bool]


def defines_all(module: Any, hook: str) -> bool:
    """Treat every hook as defined by the module, so that all of them are called."""
    return True


class UserStep:
    """The hooks of one sub-model, looked up once; those that the user did not define cost nothing.

    Args:
        module: A copy of the user's LightningModule.
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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Call the user's step with as many arguments as it takes."""
        return self.module.training_step(*(batch, batch_idx)[: self.num_arguments])


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
    if output is None:
        return None
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
