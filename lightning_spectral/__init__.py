"""Federated learning of models that no client can hold whole: spectral model sharding for PyTorch Lightning.

What most users need is here; the rest is in the packages below. Importing this imports neither Lightning nor
torch: a name is looked up when it is first used.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_spectral.front_door import INSTEAD as _INSTEAD
from lightning_spectral.front_door import PLACES as _PLACES
from lightning_spectral.front_door import register_strategies

__version__ = "0.1.0"

_ROOMS = {place.partition(".")[0] for place in _PLACES.values()} | {
    *("client", "functional", "server", "models", "network", "report", "testing")
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Import a name on first use."""
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    if name in _PLACES:
        globals()[name] = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
        return globals()[name]
    instead = _INSTEAD.get(name, "")
    for room in () if instead or not name[:1].isupper() else (*sorted(_ROOMS), "plugin.callbacks"):
        with suppress(ImportError):  # of what an extra installs
            if name in _words_of(room) and name in getattr(import_module(f"{__name__}.{room}"), "__all__", ()):
                instead = f"ls.{room}.{name}"
    said = f"module {__name__!r} has no attribute {name!r}{f': write {instead}' if instead else ''}"
    raise AttributeError(said, name=name, obj=import_module(__name__))


@cache
def _words_of(room: str) -> frozenset[str]:
    """What may be the name of a class in a room, read from its files: importing some of them takes seconds."""
    place = Path(__file__).parent / room.replace(".", "/")
    files = place.glob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    return frozenset(word for file in files for word in re.findall(r"\b[A-Z]\w*", file.read_text(encoding="utf-8")))


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS, *(name for name in globals() if name.startswith("__"))})


register_strategies()
