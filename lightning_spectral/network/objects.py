"""Choices and device halves as bytes: dataclasses, field by field, so that nothing that is sent is unpickled.

Every container says what it is::

    ["object", "lightning_spectral.client.local_hooks:ProximalTerm", {"mu": 0.1}]

An object is read by calling the constructor of its class, a dataclass of a package that the reader trusts.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, reduce
from importlib import import_module
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.errors import RecordError, from_extra
from lightning_spectral.protocol.codec import read_tensors, write_tensors

with from_extra("network"):
    from msgspec import MsgspecError, msgpack

T = TypeVar("T")
TRUSTED = ("lightning_spectral",)
_SCALARS = (type(None), bool, int, float, str)


def write_object(value: object) -> bytes:
    """Write an object as bytes.

    Args:
        value: A dataclass whose fields hold numbers, text, tensors, arrays, classes of layers and optimizers, other
            dataclasses, and tuples, lists, frozen sets and mappings of them. What it computed from its fields is left
            out.

    Raises:
        RecordError: If it holds anything else, for example a function; the message says where.

    Example:
        >>> from lightning_spectral.client.local_hooks import LocalHook, ProximalTerm
        >>> read_object(write_object(ProximalTerm(0.5)), LocalHook)
        ProximalTerm(mu=0.5)
    """
    name = type(value).__name__
    try:
        return msgpack.encode(_plain(value, name))
    except (OverflowError, UnicodeEncodeError) as error:
        raise RecordError(f"{name} cannot be sent to devices: {error}.") from error


def read_object(data: bytes, kind: type[T], trusted: Collection[str] = ()) -> T:
    """Read an object that `write_object` wrote.

    Args:
        data: The bytes.
        kind: The class of which it must be.
        trusted: Packages whose dataclasses may be made, besides this one.

    Raises:
        RecordError: If it is not of this class, names a class that is not a dataclass of a trusted package, or a class
            does not accept its fields.
    """
    try:
        found = _made(msgpack.decode(data), trusted, kind.__name__)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RecordError(f"The bytes of a {kind.__name__} cannot be read: {error}.") from error
    if not isinstance(found, kind):
        raise RecordError(f"Expected an object of type {kind.__name__}, got a {type(found).__name__}.")
    return found


def _plain(value: Any, where: str) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return ("tensor", write_tensors({"": value}))
    if isinstance(value, np.ndarray):
        return ("array", write_tensors({"": torch.from_numpy(np.ascontiguousarray(value))}))
    if type(value) in (tuple, list, frozenset):
        values = sorted(value, key=repr) if isinstance(value, frozenset) else value
        return (type(value).__name__, [_plain(inner, f"{where}[{i}]") for i, inner in enumerate(values)])
    if isinstance(value, Mapping):
        pairs = [(_plain(k, f"a key of {where}"), _plain(v, f"{where}[{k!r}]")) for k, v in value.items()]
        return ("mapping", pairs)
    if isinstance(value, type) and issubclass(value, nn.Module | Optimizer):
        return ("class", _path(value, where))
    if is_dataclass(value) and not isinstance(value, type):
        given = [field.name for field in fields(value) if field.init]
        parts = {name: _plain(getattr(value, name), f"{type(value).__name__}.{name}") for name in given}
        return ("object", _path(type(value), where), parts)
    raise RecordError(
        f"{where} cannot be sent to devices: it is of type {type(value).__name__}. What is sent is a dataclass of "
        "numbers, text, tensors and other dataclasses; keep functions in its methods."
    )


def _made(plain: Any, trusted: Collection[str], where: str) -> Any:
    inner = partial(_made, trusted=trusted, where=where)
    if type(plain) in _SCALARS:
        return plain
    try:
        match plain:
            case ["tensor", bytes(data)]:
                return read_tensors(data)[""]
            case ["array", bytes(data)]:
                return read_tensors(data)[""].numpy()
            case ["tuple", list(values)]:
                return tuple(map(inner, values))
            case ["list", list(values)]:
                return list(map(inner, values))
            case ["frozenset", list(values)]:
                return frozenset(map(inner, values))
            case ["mapping", list(pairs)]:
                return {inner(key): inner(value) for key, value in pairs}
            case ["class", str(path)]:
                return _class(path, trusted, where, nn.Module, Optimizer)
            case ["object", str(path), dict(given)]:
                made = {name: _made(value, trusted, f"{where}.{name}") for name, value in given.items()}
                return _class(path, trusted, where)(**made)
    except RecordError:
        raise
    except (TypeError, ValueError, KeyError) as error:  # not hashable, not a pair, or what the constructor says
        raise RecordError(f"{where} cannot be made: {error}") from error
    raise RecordError(f"{where} cannot be read: it is not an object that was written for devices.")


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
