"""What records are made of, as JSON: numbers exactly, tensors by their position in a list, all checked when read."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.records import Download, Failure, LoggedValue, Upload
from lightning_spectral.protocol.tensor_bytes import check_dense
from lightning_spectral.protocol.work_unit import WorkUnit

MOST_LEVELS = 32
RECORDS = (Download, Upload, Failure, LoggedValue)
SHORT = 2**63  # larger whole numbers are written in base 16, which Python reads at any length


def pack(value: Any, tensors: list[Tensor], where: str, level: int = 0) -> Any:
    """Turn a value into JSON.

    Args:
        value: A record, a number, text, a tensor, ``None``, or a tuple, list, frozen set or mapping of such values.
        tensors: Its tensors are appended to this list; each is written as its position.
        where: What error messages call the value.
        level: How many values it lies within.

    Raises:
        RecordError: If it holds anything else, or is nested too deeply.

    Example:
        >>> pack((1, float("inf"), {2: "two"}), [], "value")
        {'tuple': [1, {'float': '7ff0000000000000'}, {'dict': [[2, 'two']]}]}
    """
    _check_level(level, where)

    def packed(values: Iterable[Any]) -> list[Any]:
        return [pack(inner, tensors, f"{where}[{i}]", level + 1) for i, inner in enumerate(values)]

    value = value.item() if isinstance(value, np.generic) else value
    kind: Any = type(value)
    if kind in (NoneType, bool, str):
        return value
    if kind is int:
        return value if abs(value) < SHORT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
    if isinstance(value, Tensor):
        check_dense(value, where)
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if kind is list:
        return packed(value)
    if kind in (tuple, WorkUnit):
        return {"tuple": packed(value)}
    if kind is frozenset:
        return {"frozenset": packed(sorted(value, key=repr))}
    if isinstance(value, Mapping):
        keys = packed(value)
        values = [pack(inner, tensors, _entry(where, key), level + 1) for key, inner in value.items()]
        return {"dict": [list(pair) for pair in zip(keys, values, strict=True)]}
    if kind in RECORDS:
        attributes = {name: getattr(value, name) for name in _hints(kind)}
        return {"dict": [[n, pack(inner, tensors, f"{where}.{n}", level + 1)] for n, inner in attributes.items()]}
    raise RecordError(
        f"{where} cannot be sent: it is of type {kind.__name__}. Records hold numbers, text and tensors, and tuples, "
        "lists and mappings of them."
    )


def unpack(packed: Any, tensors: Sequence[Tensor], where: str, level: int = 0) -> Any:
    """The value that `pack` turned into JSON; a record becomes a mapping, of which `conform` makes the record.

    Raises:
        RecordError: If `pack` does not write such JSON.
    """
    _check_level(level, where)

    def unpacked(values: list[Any]) -> list[Any]:
        return [unpack(inner, tensors, f"{where}[{i}]", level + 1) for i, inner in enumerate(values)]

    match packed:
        case None | bool() | int() | float() | str():
            return packed
        case list():
            return unpacked(packed)
        case {"tensor": int(index)} if 0 <= index < len(tensors):
            return tensors[index]
        case {"tuple": list(values)}:
            return tuple(unpacked(values))
    try:
        match packed:
            case {"int": str(digits)}:
                return int(digits, 16)
            case {"float": str(digits)}:
                return struct.unpack(">d", bytes.fromhex(digits))[0]
            case {"frozenset": list(values)}:
                return frozenset(unpacked(values))
            case {"dict": list(pairs)}:
                return dict(map(unpacked, pairs))
    except RecordError:
        raise
    except (ValueError, TypeError, struct.error) as error:  # not a number, not hashable, not a pair
        raise RecordError(f"{where} cannot be read: {error}.") from error
    raise RecordError(f"{where} cannot be read: records hold no such value.")


def conform(value: Any, hint: Any, where: str) -> Any:
    """Check what `unpack` returned against the type hint of a record or of one of its fields, and make the records.

    Args:
        value: The value.
        hint: The type hint.
        where: What error messages call the value.

    Raises:
        RecordError: If it does not match the hint.

    Example:
        >>> conform((7, "words", 80), WorkUnit, "unit")
        WorkUnit(client_id=7, model='words', coefficient=80)
    """
    origin, args, kind = get_origin(hint), get_args(hint), type(value)
    if hint is Any or kind is hint or (hint is float and kind is int):
        return value
    if origin in (Union, UnionType):  # of something and None
        return None if value is None else conform(value, args[0], where)
    if origin is Literal and kind is str and value in args:
        return value
    if origin in (tuple, frozenset) and kind is origin:
        return origin(conform(inner, args[0], f"{where}[{i}]") for i, inner in enumerate(value))
    if origin is Mapping and kind is dict:
        keys = [conform(key, args[0], f"a key of {where}") for key in value]
        return {key: conform(value[key], args[1], _entry(where, key)) for key in keys}
    if hint is WorkUnit and kind is tuple and len(value) == len(_hints(hint)):
        return WorkUnit(
            *(conform(v, of, f"{where}.{n}") for v, (n, of) in zip(value, _hints(hint).items(), strict=True))
        )
    if hint in RECORDS and kind is dict and value.keys() == _hints(hint).keys():
        return hint(**{name: conform(value[name], of, f"{where}.{name}") for name, of in _hints(hint).items()})
    raise RecordError(f"{where} must be {_named(hint)}, got a value of type {kind.__name__}.")


def _check_level(level: int, where: str) -> None:
    if level > MOST_LEVELS:
        raise RecordError(f"{where} is nested too deeply: a record has at most {MOST_LEVELS} levels.")


@cache
def _hints(record: Any) -> dict[str, Any]:
    """The type hints of the fields of a record that are sent."""
    hints = get_type_hints(record)
    hints.pop("cause", None)  # an exception stays in its process
    return hints


def _entry(where: str, key: object) -> str:
    return f"{where}[{key!r}]" if isinstance(key, str) else f"an entry of {where}"


def _named(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return f"of type {(get_origin(hint) or hint).__name__}"
