"""Opens the files of runs: ordinary files only, up to a size, and none outside the folder of their run.

A report is made of folders that others may have filled. A pipe would never end, a device would return anything, and a
link or a path in a table could lead to any file of the reader.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_spectral.errors import ReportError

MEGABYTE = 2**20
# The largest files that are read, far beyond those of ordinary runs, in megabytes.
LOG_MEGABYTES = 1024  # the binary logs of wandb and TensorBoard, which may hold images
TEXT_MEGABYTES = 256  # CSV and JSON
SETTINGS_MEGABYTES = 1  # YAML, which takes seconds per megabyte

# What parsers raise for files that their own programs did not write.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


def unreadable(path: Path, reason: object) -> ReportError:
    """The error for a file that its program would not have written."""
    return ReportError(f"{path} cannot be read: {reason}. Correct or remove it.")


def not_installed(path: Path, program: str) -> ReportError:
    """The error for a run whose reader is missing."""
    return ReportError(
        f'{path} is a run of {program}, which is not installed: pip install "lightning-spectral[report]".'
    )


def read_bytes(path: Path, megabytes: int, folder: Path | None = None) -> bytes:
    """Read a file that `check_file` accepts."""
    check_file(path, megabytes, folder)
    try:
        with path.open("rb") as file:
            return file.read(megabytes * MEGABYTE)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}.") from error


def check_file(path: Path, megabytes: int, folder: Path | None = None) -> None:
    """Check that a file may be read: one of at most so many megabytes, in the folder after links are followed."""
    if folder is not None:
        check_inside(path, folder)
    try:
        size = path.stat().st_size
    except (OSError, ValueError) as error:  # ValueError: its name has a null character
        raise ReportError(f"{path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    if not path.is_file():
        raise ReportError(f"{path} cannot be read: it is not an ordinary file. Remove it.")
    if size > megabytes * MEGABYTE:
        raise ReportError(f"{path} has {size / MEGABYTE:.0f} MB; a report reads at most {megabytes}. Remove it.")


def check_inside(path: Path, folder: Path) -> None:
    """Raise a `ReportError` if a path leads out of a folder, after links are followed."""
    if not real_path(path).is_relative_to(real_path(folder)):
        raise ReportError(f"{path} points outside {folder}, so it is not read. Copy it there, or remove it.")


def real_path(path: Path) -> Path:
    """The path after links are followed, as far as they lead."""
    return Path(os.path.realpath(path))  # `Path.resolve` raises at circular links


def files_below(folder: Path) -> Iterator[Path]:
    """Everything in a folder and its subfolders that is not a folder; links to folders are not followed."""
    folders = [folder]
    while folders:
        for path in _entries(folders.pop()):
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            else:
                yield path


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it may not be listed
        return []
