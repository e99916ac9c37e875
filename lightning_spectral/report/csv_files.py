"""Reads what Lightning's CSVLogger and `RoundDashboard` left in a folder."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_spectral.report.files import TEXT_MEGABYTES, check_inside, files_below, read_bytes, unreadable
from lightning_spectral.report.hparams import read_hparams
from lightning_spectral.report.media import LoggedHistogram, LoggedTable, as_histogram
from lightning_spectral.report.names import HISTOGRAMS, ROUND, TABLES
from lightning_spectral.report.runs import NOT_ENDED, LoggedRun, as_cell, build_run

DASHBOARD = "dashboard"  # the folder next to the metrics


class Cells(NamedTuple):
    """A CSV file, whose rows are all as long as ``columns``."""

    columns: list[str]
    rows: list[list[str]]
    is_whole: bool  # or the last row was cut off and is left out


def read_csv(path: Path) -> LoggedRun:
    """Read a ``metrics.csv``, the settings in the ``hparams.yaml`` next to it, and the dashboard's files."""
    cells = _cells(path)
    rows = [dict(zip(cells.columns, row, strict=True)) for row in cells.rows]
    logged = [*rows, *_shown(path.with_name(DASHBOARD))]
    run = build_run("/".join(path.parent.parts[-2:]), path, read_hparams(path.parent), logged)
    return run if cells.is_whole else run.noting(NOT_ENDED)


def _cells(path: Path, folder: Path | None = None) -> Cells:
    try:
        text = read_bytes(path, TEXT_MEGABYTES, folder).decode("utf-8")
        whole = text[: text.rfind("\n") + 1]
        columns, *rows = [row for row in csv.reader(io.StringIO(whole, newline="")) if row] or [[]]
    except (UnicodeDecodeError, csv.Error) as error:
        raise unreadable(path, error) from error
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise unreadable(path, f"row {number} has {len(row)} cells, and the header has {len(columns)}")
    return Cells(columns, rows, whole == text)


def _shown(folder: Path) -> Iterator[dict[str, Any]]:
    """The contents of each file, ``clients_000010.csv`` for round 10; several models have a folder each."""
    check_inside(folder, folder.parent)
    for path in sorted(path for path in files_below(folder) if path.suffix == ".csv"):
        kind, _, round_idx = path.stem.rpartition("_")
        if not round_idx.isdecimal():
            continue  # not of the dashboard
        cells = _cells(path, folder.parent)
        if not cells.is_whole:
            raise unreadable(path, "its last row is cut off")
        if cells.rows:
            model = path.parent.relative_to(folder).as_posix().removeprefix(".")
            table = {f"{model}/{TABLES}{kind}".removeprefix("/"): _table(cells)}
            yield {ROUND: int(round_idx), **(_histograms(path, cells) if kind == HISTOGRAMS else table)}


def _table(cells: Cells) -> LoggedTable:
    return LoggedTable(tuple(cells.columns), tuple(tuple(map(as_cell, row)) for row in cells.rows))


def _histograms(path: Path, cells: Cells) -> dict[str, LoggedHistogram]:
    bins: dict[str, list[Sequence[float]]] = defaultdict(list)
    if missing := {"histogram", "left", "right", "count"} - set(cells.columns):
        raise unreadable(path, f"it has no column `{min(missing)}`")
    try:
        for row in (dict(zip(cells.columns, row, strict=True)) for row in cells.rows):
            bins[row["histogram"]].append([float(row[name]) for name in ("left", "right", "count")])
        return {name: _histogram(own) for name, own in bins.items()}
    except ValueError as error:
        raise unreadable(path, error) from error


def _histogram(bins: Sequence[Sequence[float]]) -> LoggedHistogram:
    left, right, counts = zip(*bins, strict=True)
    return as_histogram([left[0], *right], counts)
