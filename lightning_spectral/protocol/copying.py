"""Deep copies of a user's module, on which clients train; errors name the part that cannot be copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod


def check_copyable(module: nn.Module) -> None:
    """Raise ``ValueError`` if a module cannot be copied; parameters and buffers are shared, so this takes no memory.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> layer.penalty = layer.weight.square().sum()
        >>> check_copyable(nn.Sequential(layer))
        Traceback (most recent call last):
        ValueError: Clients train copies of Sequential, and `0.penalty` cannot be copied: it is a tensor with a gradient
        function. Write `.detach()` where it is kept, or compute it in every step.
    """
    deep_copy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def deep_copy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """A deep copy of a module.

    A weight that a hook of ``torch.nn.utils`` computes before every forward pass (``weight_norm``, ``prune``) is copied
    without its gradient function, which would lead to the original's parameters.

    Args:
        module: Any module; it is only read.
        memo: As for `copy.deepcopy`; the Trainer that a LightningModule is attached to is replaced with ``None`` in it.

    Raises:
        ValueError: If a part cannot be copied; the message names it.
    """
    trainer = getattr(module, "_trainer", None)  # of a LightningModule in a fit
    if trainer is not None:
        memo[id(trainer)] = None
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"Clients train copies of {type(module).__name__}, and {path!r} is a scripted or traced module, whose "
                "copies cannot be trained; use the module that it was made of, and script it after training."
            )
    memo.update({id(weight): weight.detach().clone() for weight in _recomputed(module)})
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        name, value = _uncopied(module, memo)
        raise ValueError(
            f"Clients train copies of {type(module).__name__}, and `{name}` cannot be copied: {_reason(value, error)}"
        ) from error


def weight_hooks(layer: nn.Module) -> list[Any]:
    """The hooks of ``torch.nn.utils``, such as that of its `weight_norm`, that compute a weight before every pass."""
    hooks = layer._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def _recomputed(module: nn.Module) -> Iterator[Tensor]:
    """The weights that hooks of ``torch.nn.utils`` compute, as they were in the last forward pass."""
    for part in module.modules():
        for hook in weight_hooks(part):
            name = hook._tensor_name if isinstance(hook, BasePruningMethod) else getattr(hook, "name", "")
            weight = vars(part).get(name)
            if isinstance(weight, Tensor) and not weight.is_leaf:
                yield weight


def _uncopied(module: nn.Module, memo: dict[int, Any]) -> tuple[str, Any]:
    """The first attribute that cannot be copied: its dotted name, and its value."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name != "_modules":
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    return f"{path}.{name}" if path else name, value
    return type(module).__name__, module


def _reason(value: Any, error: Exception) -> str:
    if isinstance(value, Tensor) and not value.is_leaf:
        return (
            "it is a tensor with a gradient function. Write `.detach()` where it is kept, or compute it in every step."
        )
    return f"{error}. Create it where it is used, or keep it outside of the module."
