"""Numbers with units: as they are shown, and bytes as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lightning_spectral.arguments import Number

BYTES = Number(above=0, finite=False, hint="a plain number is in bytes; with a unit, write '512 MB' or '0.5 GiB'")
UNITS: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        **{f"{letter}B": 1000**power for power, letter in enumerate("kMGT", start=1)},
        **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)},
    }
)


def show_count(number: float) -> str:
    """A number with a decimal unit: 11_173_962 is ``'11.2 M'``."""
    return _with_unit(number, 1000, ("", " k", " M", " G", " T", " P"))


def show_bytes(number: float) -> str:
    """A number of bytes with a binary unit: 5 * 2**20 is ``'5.00 MiB'``."""
    return _with_unit(number, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def as_bytes(argument: str, value: Any) -> Any:
    """A positive number of bytes, given as such or with a unit, of powers of 1000 (MB) or of 1024 (MiB).

    Units may be written in lower case.

    Example:
        >>> as_bytes("memory", "512 MB"), as_bytes("memory", "0.5GiB"), as_bytes("memory", 1024)
        (512000000, 536870912, 1024)
        >>> as_bytes("memory", "512")
        Traceback (most recent call last):
        ValueError: `memory` must have a unit, B, kB, MB, GB, TB, KiB, MiB, GiB, TiB, such as '512 MB'; got '512'.
    """
    if not isinstance(value, str):
        return BYTES(argument, value)
    found = re.fullmatch(r"\s*(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*([a-z]+)\s*", value, re.IGNORECASE)
    unit = None if found is None else {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower())
    if found is None or unit is None:
        raise ValueError(f"`{argument}` must have a unit, {', '.join(UNITS)}, such as '512 MB'; got {value!r}.")
    if (number := float(found[1])) <= 0:
        raise ValueError(f"`{argument}` must be positive, got {value!r}.")
    return int(number * unit)


def _with_unit(number: float, base: int, units: Sequence[str]) -> str:
    power = 0
    while number >= base and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if power == 0 or number >= 100 else 1 if number >= 10 else 2
    return f"{number:.{digits}f}{units[power]}"
