"""Reads what Lightning's CSVLogger and `RoundDashboard` left in a folder."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lightning_spectral.errors import ReportError
from lightning_spectral.report.names import HISTOGRAMS, ROUND, TABLES
from lightning_spectral.report.runs import Histogram, Run, Table, as_number, build_run

DASHBOARD = "dashboard"  # the folder beside the metrics


def read_csv(path: Path) -> Run:
    """Read a ``metrics.csv``, the settings in the ``hparams.yaml`` beside it, and the dashboard's files."""
    logged = [*_rows(path), *_shown(path.with_name(DASHBOARD))]
    return build_run("/".join(path.parent.parts[-2:]), path, _settings(path.with_name("hparams.yaml")), logged)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _shown(folder: Path) -> Iterator[dict[str, Any]]:
    """What each file shows, ``clients_000010.csv`` for round 10; those of several models are in folders of theirs."""
    for path in sorted(folder.rglob("*.csv")):
        kind, _, round_idx = path.stem.rpartition("_")
        if rows := _rows(path):
            model = path.parent.relative_to(folder).as_posix().removeprefix(".")
            table = {f"{model}/{TABLES}{kind}".removeprefix("/"): _table(rows)}
            yield {ROUND: int(round_idx), **(_histograms(rows) if kind == HISTOGRAMS else table)}


def _table(rows: list[dict[str, str]]) -> Table:
    return Table(tuple(rows[0]), tuple(tuple(map(_cell, row.values())) for row in rows))


def _cell(text: str) -> str | float:
    """A number as a number, without decimals if it is whole; anything else, also an empty cell, as it is."""
    number = as_number(text)
    if number is None:
        return text
    return int(number) if number.is_integer() else number


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


def _settings(path: Path) -> dict[str, Any]:
    try:
        return (yaml.load(path.read_text(encoding="utf-8"), _Lenient) or {}) if path.exists() else {}
    except yaml.YAMLError as error:
        raise ReportError(f"{path} cannot be read: {error}. Correct or remove it.") from error


class _Lenient(yaml.SafeLoader):  # type: ignore[misc]
    """Reads objects of other people's classes as their names: nothing in a file is executed."""


def _as_name(loader: yaml.SafeLoader, suffix: str, node: yaml.Node) -> str:
    return suffix.rpartition(":")[2]


_Lenient.add_multi_constructor("", _as_name)  # for all tags that YAML itself does not know
