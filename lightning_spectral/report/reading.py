"""Finds runs on the disk and reads each with the reader for its format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.csv_files import read_csv
from lightning_spectral.report.runs import Run, build_run
from lightning_spectral.report.tensorboard_file import read_tensorboard
from lightning_spectral.report.wandb_file import read_wandb

METRICS_FILE = "metrics.csv"
EVENTS_FILE = "events.out.tfevents."  # prefix of their names
EXPECTED = (
    "a `.wandb` file, a `metrics.csv` of CSVLogger, an event file of TensorBoard, a JSON file of `RoundHistory.save`, "
    "or a folder of such runs"
)


def read_runs(paths: Iterable[Path]) -> tuple[list[Run], list[str]]:
    """Read all runs under some paths.

    Args:
        paths: Paths of runs: a ``.wandb`` file, a ``metrics.csv``, an event file of TensorBoard, a JSON file of
            `RoundHistory.save`; or of folders, which are searched for all kinds but the last.

    Returns:
        The runs, each once, and the reasons why other runs found in a folder are left out.

    Raises:
        ReportError: If a file that is named cannot be read, or if a folder has no readable run.
    """
    runs: dict[Path, Run] = {}
    left_out: list[str] = []
    for path in paths:
        found = _runs_in(path) if path.is_dir() else [path]
        for file in found:
            if file.resolve() not in runs:
                try:
                    runs[file.resolve()] = read_run(file)
                except ReportError as error:
                    if len(found) == 1:
                        raise
                    left_out.append(str(error))
        if not any(file.resolve() in runs for file in found):
            raise ReportError("\n".join([f"None of the {len(found)} runs in {path} can be read:", *left_out]))
    if not runs:
        raise ReportError(f"No run was named; expected {EXPECTED}.")
    return list(runs.values()), left_out


def read_run(path: Path) -> Run:
    """Read one run from its file.

    Raises:
        ReportError: If it does not exist, is not a run, or has no round.
    """
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


def read_history(path: Path) -> Run:
    """Read what `RoundHistory.save` wrote."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        config, logged = saved["config"], list(_parts(saved["rows"], set(saved["from_clients"])))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReportError(f"{path} is not a run: it was not written by `RoundHistory.save`.") from error
    return build_run(path.stem, path, config, logged)


def _parts(rows: Sequence[dict[str, Any]], from_clients: set[str]) -> Iterator[dict[str, Any]]:
    """Each row as loggers get it: first the round, then the evaluation of its model."""
    for row in rows:
        yield {name: value for name, value in row.items() if name in from_clients}
        yield {name: value for name, value in row.items() if name not in from_clients}


def _runs_in(folder: Path) -> list[Path]:
    found = sorted(path for name in ("*.wandb", METRICS_FILE, f"{EVENTS_FILE}*") for path in folder.rglob(name))
    if not found:
        raise ReportError(f"{folder} has no run in it; expected {EXPECTED}. JSON files are named one by one.")
    return found
