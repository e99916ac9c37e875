"""Hooks on the gradients of parameters, which a deep copy of a module does not include."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_spectral.protocol.rebinding import Rebinding, check_globals, kept_functions

Hook = Callable[[Tensor], Any]
KINDS = {  # where a tensor keeps its hooks, and what adds one
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}


def gradient_hooks(tensor: Tensor) -> list[tuple[str, Hook]]:
    """The hooks on a tensor's gradient, each with the name of the method that adds it.

    Example:
        >>> weight = nn.Linear(2, 1).weight
        >>> handle = weight.register_hook(abs)
        >>> gradient_hooks(weight)
        [('register_hook', <built-in function abs>)]
    """
    return [(add, hook) for kind, add in KINDS.items() for hook in (getattr(tensor, kind) or {}).values()]


def carry_gradient_hooks(module: nn.Module, memo: dict[int, Any]) -> None:
    """Give the parameters of a module's copy the hooks of the original parameters.

    A hook that refers to the original, as a method of it or in its closure, then refers to the copy.

    Args:
        module: The original.
        memo: The memo of `copy.deepcopy`, which maps its parts to those of the copy.

    Raises:
        ValueError: If the copy shares a parameter that has hooks, so that they would be lost.
    """
    rebound = Rebinding(memo)
    for name, parameter, add, hook in _hooks_of(module):
        if memo.get(id(parameter), parameter) is parameter:
            raise ValueError(
                f"{name!r} has a gradient hook, and clients hold something else in its place, so the hook would be "
                "lost: keep it dense with `exclude=`, or add the hook before the layers are planned."
            )
        getattr(memo[id(parameter)], add)(rebound(copy.deepcopy(hook, memo)))


def check_functions(module: nn.Module) -> None:
    """Raise ``ValueError`` if a hook, or another function that a module keeps, refers to the module by a global name.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> check_functions(line)
    """
    gradient = ((f"The gradient hook of {name!r}", hook) for name, _, _, hook in _hooks_of(module))
    check_globals(module, chain(gradient, kept_functions(module)))


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str, Hook]]:
    for name, parameter in module.named_parameters():
        for add, hook in gradient_hooks(parameter):
            yield name, parameter, add, hook
