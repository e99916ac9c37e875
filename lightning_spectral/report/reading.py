"""Finds runs on the disk and reads each with the reader for its format."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.csv_files import read_csv
from lightning_spectral.report.files import (
    LOG_MEGABYTES,
    MALFORMED,
    TEXT_MEGABYTES,
    check_file,
    files_below,
    read_bytes,
    real_path,
)
from lightning_spectral.report.runs import LoggedRun, build_run
from lightning_spectral.report.tensorboard_file import read_tensorboard
from lightning_spectral.report.texts import printable, shortened
from lightning_spectral.report.wandb_file import read_wandb

MAX_REASON = 500  # letters
METRICS_FILE = "metrics.csv"
EVENTS_FILE = "events.out.tfevents."  # prefix of their names
EXPECTED = (
    "a `.wandb` file, a `metrics.csv` of CSVLogger, an event file of TensorBoard, a JSON file of `RoundHistory.save`, "
    "or a folder of such runs"
)


def labelled(path: Path) -> tuple[str, Path]:
    """Take ``label=path`` apart; anything that exists is a path without a label.

    Example:
        >>> labelled(Path("ours=runs/a")), labelled(Path("runs/b"))
        (('ours', PosixPath('runs/a')), ('', PosixPath('runs/b')))
    """
    label, _, named = str(path).partition("=")
    is_label = label and named and not os.path.lexists(path)
    return (printable(label), Path(named)) if is_label else ("", path)


def read_runs(paths: Iterable[Path]) -> tuple[list[LoggedRun], list[str]]:
    """Read the runs at some paths, which may have labels; folders are searched for all kinds but JSON files.

    Returns:
        The runs, each once, and the reasons why other runs found in a folder are left out.
    """
    runs: dict[Path, LoggedRun] = {}
    left_out: list[str] = []
    for label, path in map(labelled, paths):
        is_folder = os.path.isdir(path)  # `Path.is_dir` raises for names that are too long
        found = _runs_in(path) if is_folder else [path]
        for file in found:
            if real_path(file) not in runs:
                try:
                    found_run = read_run(file, within=path if is_folder else None)
                    runs[real_path(file)] = replace(found_run, label=label)
                except ReportError as error:
                    if len(found) == 1:
                        raise
                    left_out.append(str(error))
        if not any(real_path(file) in runs for file in found):
            raise ReportError("\n".join([f"None of the {len(found)} runs in {path} can be read:", *left_out]))
    if not runs:
        raise ReportError(f"No run was given; expected {EXPECTED}.")
    return list(runs.values()), left_out


def read_run(path: Path, within: Path | None = None) -> LoggedRun:
    """Read one run from its file, which must not lead out of the folder ``within``."""
    try:
        if within is not None:
            check_file(path, LOG_MEGABYTES, within)
        return _read(path)
    except ReportError as error:
        raise ReportError(shortened(printable(str(error)), len(str(path)) + MAX_REASON)) from error
    except (OSError, *MALFORMED) as error:
        reason = shortened(f"{type(error).__name__}: {error}", MAX_REASON)
        raise ReportError(printable(f"{path} cannot be read: {reason}. Correct or remove it.")) from error


def _read(path: Path) -> LoggedRun:
    if not path.exists():
        raise ReportError(f"{path} does not exist; expected {EXPECTED}.")
    if path.suffix == ".wandb":
        return read_wandb(path)
    if path.name == METRICS_FILE:
        return read_csv(path)
    if path.name.startswith(EVENTS_FILE):
        return read_tensorboard(path)
    if path.suffix == ".json":
        return read_history(path)
    raise ReportError(f"{path} is not a run; expected {EXPECTED}.")


def read_history(path: Path) -> LoggedRun:
    """Read what `RoundHistory.save` wrote."""
    content = read_bytes(path, TEXT_MEGABYTES)
    try:
        saved = json.loads(content)
        config, logged = dict(saved["config"]), list(_parts(saved["rows"], set(saved["from_clients"])))
    except MALFORMED as error:
        raise ReportError(f"{path} is not a run: it was not written by `RoundHistory.save`.") from error
    return build_run(path.stem, path, config, logged)


def _parts(rows: Sequence[dict[str, Any]], from_clients: set[str]) -> Iterator[dict[str, Any]]:
    """Each row as loggers get it: first the round, then the evaluation of its model."""
    for row in rows:
        yield {name: value for name, value in row.items() if name in from_clients}
        yield {name: value for name, value in row.items() if name not in from_clients}


def _runs_in(folder: Path) -> list[Path]:
    found = sorted(path for path in files_below(folder) if _is_run(path.name))
    if not found:
        raise ReportError(f"{folder} contains no run; expected {EXPECTED}. Name JSON files one by one.")
    return found


def _is_run(name: str) -> bool:
    return name == METRICS_FILE or name.endswith(".wandb") or name.startswith(EVENTS_FILE)
