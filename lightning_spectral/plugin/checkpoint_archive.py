"""Finds out which round a checkpoint file holds, and whether it is intact, without executing anything in it."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

NEEDED = ("epoch", "global_step", "loops", "optimizer_states")


class DamagedFile(Exception):
    """The file cannot be resumed from; the message says why."""


def saved_progress(path: Path) -> tuple[int, int]:
    """The server's steps and Lightning's epoch in a checkpoint; tensors are mapped, not read.

    Raises:
        DamagedFile: If it is not a checkpoint of a Trainer, or its structure is damaged.
    """
    try:
        content = _structure(path)
    except Exception as error:  # damage surfaces as nearly any exception: from zipfile, pickle, torch or Unicode
        raise DamagedFile(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    missing = [name for name in NEEDED if not isinstance(content, dict) or name not in content]
    if missing:
        raise DamagedFile(f"it has no {', '.join(missing)}, and a run is resumed from them, not from weights alone")
    return int(content["global_step"]), int(content["epoch"])


def check_contents(path: Path) -> None:
    """Read all of a checkpoint, and compare it with the checksum of every entry of the archive.

    Raises:
        DamagedFile: If a checksum differs.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:
        raise DamagedFile(f"{type(error).__name__}: {error}") from error
    if damaged is not None:
        raise DamagedFile(f"the checksum of {damaged} does not match")


@contextmanager
def naming_damage(path: Any) -> Iterator[None]:
    """Turn torch's errors about a file that is not a whole checkpoint into a ``ValueError`` that names the file."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # nearly any exception, as above
        is_local = isinstance(path, str | Path) and "://" not in str(path)
        if not is_local or zipfile.is_zipfile(path):
            raise  # the file is whole, so the cause is something else
        raise ValueError(
            f"{path} is empty or not a whole checkpoint ({Path(path).stat().st_size} bytes); "
            "latest_checkpoint(folder) finds the last whole one of a folder."
        ) from error


def _structure(path: Path) -> Any:
    """The checkpoint with everything but plain values left empty."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("its directory names more bytes than there are")  # torch would allocate them
        for entry in entries:
            if entry.filename.endswith("data.pkl"):
                archive.read(entry)  # compares its checksum before it is interpreted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a pickle is old does not matter when looking for a file
        # torch finds every tensor's entry itself: it reads fields of the archive that zipfile does not look at
        return torch.load(path, map_location="cpu", pickle_module=_Nothing, weights_only=False, mmap=True)


class _Empty(dict[Any, Any]):
    """Stands in for an object of any class, and takes whatever state it is given."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __new__(cls, *args: Any, **options: Any) -> _Empty:
        return dict.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **options: Any) -> _Empty:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


class _EmptyUnpickler(pickle.Unpickler):
    """Imports and calls nothing."""

    def find_class(self, module: str, name: str) -> Any:
        return _Empty


_Nothing = SimpleNamespace(Unpickler=_EmptyUnpickler, load=None, __name__=__name__)
