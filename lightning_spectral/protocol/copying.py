"""Deep copies of a user's module, on which clients train; errors name the part that cannot be copied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm

from lightning_spectral.protocol.attribute_paths import parts_of


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
    named = dict(module.named_modules())
    for path, part in named.items():
        if isinstance(part, torch.jit.ScriptModule):
            raise ValueError(
                f"Clients train copies of {type(module).__name__}, and {path!r} is a scripted or traced module, whose "
                "copies cannot be trained; use the module that it was made of, and script it after training."
            )
    parts = named.values()
    # of `compile()` in place: it would call the original
    memo.update({id(part._compiled_call_impl): None for part in parts if part._compiled_call_impl})
    memo.update({id(recorder): recorder for recorder in _profilers_of(parts)})
    memo.update({id(weight): weight.detach().clone() for weight in _recomputed(parts)})
    memo.update({id(empty): type(empty)() for empty in _empty_dictionaries(parts)})
    given = dict(memo)  # a copy that fails leaves parts in `memo` that are not complete
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        name, value = _uncopied(module, given)
        raise ValueError(
            f"Clients train copies of {type(module).__name__}, and `{name}` cannot be copied: {_reason(value, error)}"
        ) from error


def weight_hooks(layer: nn.Module) -> list[Any]:
    """The hooks of ``torch.nn.utils``, such as that of its `weight_norm`, that compute a weight before every pass."""
    hooks = layer._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def normalised_weights(module: nn.Module) -> Iterator[str]:
    """Names of the parameters of torch's weight norms: directions, which cannot be zero, and their lengths.

    Example:
        >>> sorted(normalised_weights(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))))
        ['parametrizations.weight.original0', 'parametrizations.weight.original1']
    """
    for path, part in module.named_modules():
        own = {
            f"{hook.name}{end}" for hook in weight_hooks(part) if isinstance(hook, WeightNorm) for end in ("_g", "_v")
        }
        if isinstance(part, ParametrizationList) and any(isinstance(step, _WeightNorm) for step in part):
            own = {name for name, _ in part.named_parameters()}
        yield from (f"{path}.{name}" if path else name for name in own)


def _recomputed(parts: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The weights that hooks of ``torch.nn.utils`` compute, as they were in the last forward pass."""
    for part in parts:
        for hook in weight_hooks(part):
            name = hook._tensor_name if isinstance(hook, BasePruningMethod) else getattr(hook, "name", "")
            weight = vars(part).get(name)
            if isinstance(weight, Tensor) and not weight.is_leaf:
                yield weight


def _empty_dictionaries(parts: Iterable[nn.Module]) -> Iterator[dict[Any, Any]]:
    """The layers' dictionaries that are empty: a dozen for hooks in each, which `copy.deepcopy` takes long to copy."""
    for part in parts:
        for value in vars(part).values():
            if type(value) in (dict, OrderedDict) and not value:
                yield value


def _profilers_of(parts: Iterable[nn.Module]) -> Iterator[Any]:
    """What records the layers' passes for Lightning's ``PyTorchProfiler``.

    It is shared with copies: it refers to all of the module that is fitted, and, once that has been evaluated, to
    records that cannot be copied.
    """
    for part in parts:
        for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
            owner = getattr(getattr(hook, "func", hook), "__self__", None)
            if type(owner).__name__ == "RegisterRecordFunction":
                yield owner


def _uncopied(module: nn.Module, memo: dict[int, Any]) -> tuple[str, Any]:
    """The innermost part that cannot be copied, the first of several: its path, and its value."""
    path, whole, seen = "", module, {id(module)}
    while inner := next((part for part in parts_of(whole, path) if not _can_be_copied(part[1], memo, seen)), None):
        path, whole = inner
        seen.add(id(whole))
    return path or type(module).__name__, whole


def _can_be_copied(value: Any, memo: dict[int, Any], seen: Collection[int]) -> bool:
    """Whether a part can be copied; what was tried before, because parts refer to each other, is not at fault again."""
    if id(value) in seen:
        return True
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _reason(value: Any, error: Exception) -> str:
    if isinstance(value, Tensor) and not value.is_leaf:
        return (
            "it is a tensor with a gradient function. Write `.detach()` where it is kept, or compute it in every step."
        )
    return f"{error}. Create it where it is used, or keep it outside of the module."
