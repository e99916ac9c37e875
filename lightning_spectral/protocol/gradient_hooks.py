"""Hooks on the gradients of parameters, which a deep copy of a module does not include."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn

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
    for name, parameter, add, hook in _hooks_of(module):
        if memo.get(id(parameter), parameter) is parameter:
            raise ValueError(
                f"{name!r} has a gradient hook, and clients hold something else in its place, so the hook would be "
                "lost: keep it dense with `exclude=`, or add the hook before the layers are planned."
            )
        getattr(memo[id(parameter)], add)(_rebound(hook, memo))


def check_gradient_hooks(module: nn.Module) -> None:
    """Raise ``ValueError`` if a hook refers to ``module`` or a part of it by a global name, which no copy can redirect.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> check_gradient_hooks(line)
    """
    parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    for name, _, _, hook in _hooks_of(module):
        if isinstance(hook, FunctionType):
            for used, value in inspect.getclosurevars(hook).globals.items():
                if id(value) in parts:
                    raise ValueError(
                        f"The gradient hook of {name!r} uses the global variable {used!r}, which is the server's and "
                        "not a client's; add the hook in the module's `__init__` and use `self` in it, or do what it "
                        "does in `on_after_backward`."
                    )


def _hooks_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, str, Hook]]:
    for name, parameter in module.named_parameters():
        for add, hook in gradient_hooks(parameter):
            yield name, parameter, add, hook


def _rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """The hook with every copied object replaced by its copy; a deep copy leaves functions as they are."""
    if not isinstance(hook, FunctionType):
        return copy.deepcopy(hook, memo)
    cells = tuple(_copied_cell(cell, memo) for cell in hook.__closure__ or ())
    function = FunctionType(hook.__code__, hook.__globals__, hook.__name__, hook.__defaults__, cells)
    function.__kwdefaults__ = hook.__kwdefaults__
    return function


def _copied_cell(cell: CellType, memo: dict[int, Any]) -> CellType:
    try:
        content = cell.cell_contents
    except ValueError:  # not assigned yet
        return cell
    if isinstance(content, FunctionType):
        return CellType(_rebound(content, memo))
    return CellType(memo[id(content)]) if id(content) in memo else cell
