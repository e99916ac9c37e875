"""Choices and device halves as bytes: dataclasses, field by field, so that nothing that travels is unpickled.

An object is written as plain data (`plain_data`), in which every container says what it is::

    ("object", "lightning_spectral.client.local_hooks:ProximalTerm", {"mu": 0.1})

It is read by calling the constructor of its class, which must be a dataclass of a package that the reader trusts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import reduce
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.errors import RecordError

TRUSTED = ("lightning_spectral",)
_SCALARS = (type(None), bool, int, float, str)


def to_plain(value: Any, where: str = "value") -> Any:
    """Turn an object into plain data, which `protocol.codec.encode_plain` writes.

    Args:
        value: A dataclass whose fields hold numbers, text, tensors, arrays, classes of layers and optimizers, members
            of enumerations, other dataclasses, and tuples, lists, frozen sets and mappings of them. What it computed
            from its fields is left out.
        where: What error messages call the value.

    Raises:
        RecordError: If it holds anything else, for example a function.

    Example:
        >>> from lightning_spectral.client.local_hooks import ProximalTerm
        >>> to_plain(ProximalTerm(0.5))
        ('object', 'lightning_spectral.client.local_hooks:ProximalTerm', {'mu': 0.5})
    """
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) in _SCALARS or isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return ("array", torch.from_numpy(np.ascontiguousarray(value)))
    if isinstance(value, Enum):
        return ("member", _path(type(value), where), value.name)
    if type(value) in (tuple, list, frozenset):
        values = sorted(value, key=repr) if isinstance(value, frozenset) else value
        return (type(value).__name__, tuple(to_plain(inner, f"{where}[{i}]") for i, inner in enumerate(values)))
    if isinstance(value, Mapping):
        pairs = ((to_plain(k, f"a key of {where}"), to_plain(v, f"{where}[{k!r}]")) for k, v in value.items())
        return ("mapping", tuple(pairs))
    if isinstance(value, type) and issubclass(value, nn.Module | Optimizer):
        return ("class", _path(value, where))
    if is_dataclass(value) and not isinstance(value, type):
        given = {field.name: to_plain(getattr(value, field.name), f"{where}.{field.name}") for field in _given(value)}
        return ("object", _path(type(value), where), given)
    raise RecordError(
        f"{where} cannot be sent to devices: it is of type {type(value).__name__}. What is sent is a dataclass of "
        "numbers, text, tensors and other dataclasses; keep functions in its methods."
    )


def from_plain(plain: Any, trusted: Collection[str] = (), where: str = "value") -> Any:
    """The object that `to_plain` turned into plain data.

    Args:
        plain: The plain data.
        trusted: Packages whose dataclasses may be made, besides this one.
        where: What error messages call the value.

    Raises:
        RecordError: If it is not plain data of that kind, names a class that is not a dataclass of a trusted package,
            or the class does not accept its fields.

    Example:
        >>> from lightning_spectral.client.local_hooks import ProximalTerm
        >>> from_plain(to_plain(ProximalTerm(0.5)))
        ProximalTerm(mu=0.5)
        >>> from_plain(("object", "subprocess:Popen", {"args": "ls"}))
        Traceback (most recent call last):
        lightning_spectral.errors.RecordError: value names subprocess:Popen, which is not of a trusted package.
    """

    def inner(part: Any) -> Any:
        return from_plain(part, trusted, where)

    if type(plain) in _SCALARS or isinstance(plain, Tensor):
        return plain
    match plain:
        case ("tuple", tuple(values)):
            return tuple(map(inner, values))
        case ("list", tuple(values)):
            return list(map(inner, values))
        case ("frozenset", tuple(values)):
            return frozenset(map(inner, values))
        case ("mapping", tuple(pairs)) if all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            return {inner(key): inner(value) for key, value in pairs}
        case ("array", Tensor() as values):
            return values.numpy()
        case ("member", str(path), str(name)):
            return _member(_class(path, trusted, where, Enum), name, where)
        case ("class", str(path)):
            return _class(path, trusted, where, nn.Module, Optimizer)
        case ("object", str(path), dict(given)):
            attributes = {name: from_plain(value, trusted, f"{where}.{name}") for name, value in given.items()}
            return _make(_class(path, trusted, where), attributes, where)
    raise RecordError(f"{where} cannot be read: it is not an object that was written for devices.")


def _given(value: Any) -> list[Any]:
    """The fields of a dataclass that its constructor accepts."""
    return [field for field in fields(value) if field.init]


def _path(kind: type, where: str) -> str:
    if "<locals>" in kind.__qualname__ or kind.__module__ == "__main__":
        raise RecordError(
            f"{where} cannot be sent to devices: {kind.__qualname__} is defined in a function or a script; move it to "
            "a module that devices can import."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(path: str, trusted: Collection[str], where: str, *kinds: type) -> Any:
    """The class of a path: a dataclass of a trusted package, or else a subclass of one of some kinds.

    Layers and optimizers may also be of torch, and of what this process has imported already, since naming them runs
    nothing.
    """
    module, _, name = path.partition(":")
    packages = {*TRUSTED, *trusted, *({"torch"} if kinds else ())}
    if module.partition(".")[0] not in packages and not (kinds and module in sys.modules):
        raise RecordError(f"{where} names {path}, which is not of a trusted package.")
    try:
        found: Any = reduce(getattr, name.split("."), import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise RecordError(f"{where} names {path}, which is not installed here.") from error
    if not isinstance(found, type) or not (issubclass(found, kinds) if kinds else is_dataclass(found)):
        raise RecordError(f"{where} names {path}, which is not a class of the expected kind.")
    return found


def _member(kind: type[Enum], name: str, where: str) -> Enum:
    if name not in kind.__members__:
        raise RecordError(f"{where} names a member that {kind.__name__} lacks.")
    return kind[name]


def _make(kind: Any, values: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where} cannot be made: {error}") from error
