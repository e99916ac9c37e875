"""Reads what Lightning's CSVLogger and `RoundDashboard` left in a folder."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.hparams import read_hparams
from lightning_spectral.report.names import HISTOGRAMS, ROUND, TABLES
from lightning_spectral.report.runs import NOT_ENDED, Histogram, Run, Table, as_cell, build_run

DASHBOARD = "dashboard"  # the folder next to the metrics


def read_csv(path: Path) -> Run:
    """Read a ``metrics.csv``, the settings in the ``hparams.yaml`` next to it, and the dashboard's files.

    Raises:
        ReportError: If a file is not what the logger or the dashboard writes.
    """
    rows, is_whole = _rows(path)
    logged = [*rows, *_shown(path.with_name(DASHBOARD))]
    run = build_run("/".join(path.parent.parts[-2:]), path, read_hparams(path.parent), logged)
    return run if is_whole else run.noting(NOT_ENDED)


def _rows(path: Path) -> tuple[list[dict[str, str]], bool]:
    """The rows of a file, and whether the last one ends; otherwise it is left out."""
    try:
        text = path.read_bytes().decode("utf-8")
        whole = text[: text.rfind("\n") + 1]
        return list(csv.DictReader(io.StringIO(whole, newline=""))), whole == text
    except (UnicodeDecodeError, csv.Error) as error:
        raise ReportError(f"{path} cannot be read: {error}. Correct or remove it.") from error


def _shown(folder: Path) -> Iterator[dict[str, Any]]:
    """The contents of each file, ``clients_000010.csv`` for round 10; several models have a folder each."""
    for path in sorted(folder.rglob("*.csv")):
        kind, _, round_idx = path.stem.rpartition("_")
        if not round_idx.isdecimal():
            continue  # not of the dashboard
        rows, is_whole = _rows(path)
        if not is_whole:
            raise ReportError(f"{path} cannot be read: its last row has no end. Correct or remove it.")
        if rows:
            model = path.parent.relative_to(folder).as_posix().removeprefix(".")
            table = {f"{model}/{TABLES}{kind}".removeprefix("/"): _table(rows)}
            yield {ROUND: int(round_idx), **(_histograms(rows) if kind == HISTOGRAMS else table)}


def _table(rows: list[dict[str, str]]) -> Table:
    return Table(tuple(rows[0]), tuple(tuple(map(as_cell, row.values())) for row in rows))


def _histograms(rows: list[dict[str, str]]) -> dict[str, Histogram]:
    bins: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in rows:
        bins[row["histogram"]].append(row)
    return {
        name: Histogram(
            (float(own[0]["left"]), *(float(row["right"]) for row in own)), tuple(float(row["count"]) for row in own)
        )
        for name, own in bins.items()
    }
