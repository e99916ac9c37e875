"""Calling what a user wrote, with as much as it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def num_accepted(method: Callable[..., Any], num_offered: int) -> int:
    """How many of the offered positional arguments a method takes: users leave out ``batch_idx``.

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
    """The loss in what a ``training_step`` returned: a tensor, a mapping with ``"loss"``, or ``None`` to skip the step.

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
    """What ``on_train_batch_end`` gets: the step's mapping, its loss detached; nothing if the step was skipped."""
    if loss is None:
        return {}
    extra = dict(output) if isinstance(output, Mapping) else {}
    return {**extra, "loss": loss.detach()}
