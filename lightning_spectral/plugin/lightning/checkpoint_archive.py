"""Finds out which round a checkpoint file holds, and whether it is intact, without executing anything in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZipFile

from lightning_spectral.plugin.lightning.archive import DamagedFile, check_layout, read_structure

NEEDED = ("epoch", "global_step", "loops", "optimizer_states")


def saved_progress(path: Path) -> tuple[int, int]:
    """The server's steps and Lightning's epoch in a Trainer's checkpoint, if intact; tensors are not read."""
    with _naming_the_cause(), path.open("rb") as file, _archive(file) as archive:
        content = read_structure(archive)
    missing = [name for name in NEEDED if not isinstance(content, dict) or name not in content]
    if missing:
        raise DamagedFile(f"it has no {', '.join(missing)}, and a run is resumed from them, not from weights alone")
    for name in ("global_step", "epoch"):
        if not isinstance(content[name], int):
            raise DamagedFile(f"its {name} must be a whole number, got {type(content[name]).__name__}")
    return content["global_step"], content["epoch"]


def check_contents(path: Path) -> None:
    """Read all of a checkpoint, and compare it with the checksum of every entry of the archive."""
    with _naming_the_cause(), ZipFile(path) as archive:
        _check_checksums(archive)


def check_loadable(source: Any) -> None:
    """Check a checkpoint before anything loads it, because loading compares no checksums and can execute code.

    Args:
        source: A path or an opened file. Paths with a protocol (``s3://...``) are not checked.

    Raises:
        ValueError: If it is not an intact checkpoint; the message names the file and says why.
    """
    if not isinstance(source, str | os.PathLike):
        _check(source, "the given file")
    elif Path(source).is_dir():
        raise ValueError(f"{source} is a folder; latest_checkpoint({str(source)!r}) finds a checkpoint in it.")
    elif "://" not in str(source):
        with Path(source).open("rb") as file:
            _check(file, str(source))


def _check(file: IO[bytes], name: str) -> None:
    """Check an opened file, and leave it at the position where it was."""
    position = file.tell()
    try:
        with _naming_the_cause(), _archive(file) as archive:
            read_structure(archive)
            _check_checksums(archive)
    except DamagedFile as error:
        size = file.seek(0, os.SEEK_END)
        raise ValueError(
            f"{name} is empty or not a whole checkpoint ({size} bytes): {error}; "
            "latest_checkpoint(folder) finds the last whole one of a folder."
        ) from error
    finally:
        file.seek(position)


@contextmanager
def _archive(file: IO[bytes]) -> Iterator[ZipFile]:
    with ZipFile(file) as archive:
        check_layout(file, archive)
        yield archive


def _check_checksums(archive: ZipFile) -> None:
    if (damaged := archive.testzip()) is not None:
        raise DamagedFile(f"the checksum of {damaged} does not match")


@contextmanager
def _naming_the_cause() -> Iterator[None]:
    """Turn whatever damage leads to into a `DamagedFile`: nearly any exception, of zipfile, pickle or Unicode."""
    try:
        yield
    except DamagedFile:
        raise
    except Exception as error:
        raise DamagedFile(f"{type(error).__name__}: {error}".splitlines()[0]) from error
