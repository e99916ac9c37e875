"""Functions that a module keeps: a deep copy leaves them as they are, with closures that refer to the original."""

from __future__ import annotations

import copy
import dis
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

# tuples: a union would be made anew for every attribute of a module
CONTAINERS, FUNCTIONS = (list, dict), (FunctionType, MethodType, partial)


def rebind_functions(memo: dict[int, Any]) -> None:
    """Make the functions in a copied module refer to the copy: hooks, and those in attributes or containers.

    Args:
        memo: The memo of `copy.deepcopy`, which maps the ids of the original's parts to the parts of the copy.

    Raises:
        ValueError: If a function refers to a parameter that the copy shares, since something else takes its place.

    Example:
        >>> line, memo = nn.Linear(2, 1), {}
        >>> line.describe = lambda line=line: line.in_features
        >>> copied = copy.deepcopy(line, memo)
        >>> rebind_functions(memo)
        >>> copied.in_features = 5
        >>> copied.describe(), line.describe()
        (5, 2)
    """
    rebound = Rebinding(memo)
    for part in [part for key, part in memo.items() if key != id(memo)]:  # that entry keeps originals alive
        values = part if isinstance(part, CONTAINERS) else getattr(part, "__dict__", {})
        for key, value in list(enumerate(values) if isinstance(values, list) else values.items()):
            if _has_function(value) and rebound.refers(value):
                values[key] = rebound(value)


def check_globals(module: nn.Module, named: Iterable[tuple[str, Any]]) -> None:
    """Check that functions do not refer to a module or a part of it by a global name, which no copy can redirect.

    Args:
        module: The server's module.
        named: Functions with their descriptions; anything else is left alone.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> check_globals(line, [("It", lambda: line.weight)])
        Traceback (most recent call last):
        ValueError: It uses the global variable 'line', which is the server's and not a client's; let it use `self`, ...
    """
    parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    for description, function in named:
        for used in _globals_of(function):
            if id(function.__globals__.get(used)) in parts:
                raise ValueError(
                    f"{description} uses the global variable {used!r}, which is the server's and not a client's; let "
                    "it use `self`, by defining it in the module's `__init__`, or do what it does in a method."
                )


def kept_functions(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks of a module and its parts, and other attributes that may be functions, each with a description."""
    for path, part in module.named_modules():
        of = repr(path) if path else type(module).__name__
        for name, value in vars(part).items():
            if isinstance(value, dict) and name.endswith("_hooks"):
                yield from ((f"A hook of {of} (`{name}`)", hook) for hook in value.values())
            yield f"The attribute `{name}` of {of}", value


class Rebinding:
    """Maps what a function refers to, by its closure or its defaults, to the parts of a module's copy.

    What does not lead to the module stays as it is, so that a dictionary beside the module, in which a hook collects
    features, is the one that other code reads.

    Args:
        memo: The memo of `copy.deepcopy`.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, which must outlive its id

    def refers(self, value: Any) -> bool:
        """Whether a value is a part of the module, or a function or a container that leads to one."""
        return any(self._memo.get(id(reached)) is not None for reached in _reachable(value, set()))

    def __call__(self, value: Any) -> Any:
        """The counterpart of a value for the copy."""
        copied = self._memo.get(id(value))
        if copied is value and isinstance(value, nn.Parameter):
            raise ValueError(
                f"A hook or another function that the module keeps refers to a parameter of shape "
                f"{tuple(value.shape)}, and clients hold something else in its place: let the function refer to the "
                "layer and read its `weight`, or keep the layer dense with `exclude=`."
            )
        if copied is not None:
            return copied
        if id(value) not in self._made:
            if not self.refers(value):
                return value
            self._make(value)
        return self._made[id(value)][1]

    def _make(self, value: Any) -> None:
        if isinstance(value, CellType | list | dict):
            made = CellType() if isinstance(value, CellType) else copy.copy(value)
            self._made[id(value)] = value, made  # before its content, which may refer to it
            self._fill(made, value)
        else:
            self._made[id(value)] = value, self._rebuilt(value)

    def _fill(self, made: Any, value: Any) -> None:
        if isinstance(value, CellType):
            made.cell_contents = self(value.cell_contents)
        elif isinstance(value, dict):
            made.update({key: self(entry) for key, entry in value.items()})
        else:
            made[:] = map(self, value)

    def _rebuilt(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self(argument) for name, argument in value.keywords.items()}
            return type(value)(self(value.func), *map(self, value.args), **keywords)
        return tuple(map(self, value))

    def _function(self, function: FunctionType) -> FunctionType:
        cells = None if function.__closure__ is None else tuple(map(self, function.__closure__))
        named = function.__code__, function.__globals__, function.__name__
        made = FunctionType(*named, self(function.__defaults__), cells)
        made.__kwdefaults__ = self(function.__kwdefaults__)
        made.__dict__.update(function.__dict__)
        return made


def _globals_of(function: Any) -> Iterator[str]:
    """Names of the global variables that a function reads; none for anything but a function written in Python."""
    if isinstance(function, FunctionType):
        yield from (found.argval for found in dis.get_instructions(function) if found.opname == "LOAD_GLOBAL")


def _has_function(value: Any) -> bool:
    if type(value) is tuple:
        return any(map(_has_function, value))
    return isinstance(value, FUNCTIONS)


def _reachable(value: Any, seen: set[int]) -> Iterator[Any]:
    """The value, and what functions and containers in it refer to, each once."""
    if id(value) not in seen:
        seen.add(id(value))
        yield value
        for inner in _inner(value):
            yield from _reachable(inner, seen)


def _inner(value: Any) -> Iterator[Any]:
    if isinstance(value, FunctionType):
        yield from (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, CellType):
        with suppress(ValueError):  # not assigned yet
            yield value.cell_contents
    elif isinstance(value, dict):
        yield from value.values()
    elif type(value) is tuple or isinstance(value, list):
        yield from value
