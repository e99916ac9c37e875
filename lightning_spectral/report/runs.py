"""Runs as a report sees them, read from their records: one row of numbers per round, with tables and histograms."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.rounds_file import NAME, Line, read_record
from lightning_spectral.report.texts import printable, shortened

ROUND = "fl/round"
NOT_ENDED = "the file ends before the run does: it was killed, or is still running"
LARGEST = 3.4028235e38  # of float32; a metric beyond it has diverged, and its square would not be a number
MAX_REASON, MAX_NAME = 500, 200  # letters
EXPECTED = f"a `{NAME}` of `RoundHistory`, or a folder of such runs"


@dataclass(frozen=True)
class Table:
    """A table, whose rows are all as long as ``columns``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> list[Any]:
        """All values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True)
class Histogram:
    """A histogram; its edges ascend."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class LoggedRun:
    """One run."""

    name: str
    path: Path  # of the file that it was read from
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, float], ...]  # the numbers of each round, ascending by `fl/round`
    shown: Mapping[str, Mapping[int, Table | Histogram]] = field(default_factory=dict)  # by name, then by round
    from_clients: frozenset[str] = frozenset()  # metrics of the round itself, while clients trained
    notes: tuple[str, ...] = ()  # remarks on the file, for readers of the report
    label: str = ""  # of its group, if whoever asks for the report named it

    @cached_property
    def names(self) -> set[str]:
        """All metrics that the run has in some round."""
        return {name for row in self.rows for name in row}


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
    """Read the runs at some paths, which may have labels; folders are searched.

    Of a run that was resumed in another folder, only the file that was begun last is read.

    Returns:
        The runs, each once, and the reasons why files found in a folder are left out.
    """
    runs: dict[str, tuple[float, LoggedRun]] = {}
    left_out: list[str] = []
    for label, path in map(labelled, paths):
        found = _files_in(path) if os.path.isdir(path) else [path]  # `Path.is_dir` raises for names that are too long
        reasons = []
        for file in found:
            try:
                run, begun, own = _read(file)
            except ReportError as error:
                if len(found) == 1:
                    raise
                reasons.append(str(error))
                continue
            before = runs.get(run)
            if before is not None and os.path.realpath(before[1].path) != os.path.realpath(file):
                first, last = (file, before[1].path) if begun <= before[0] else (before[1].path, file)
                left_out.append(printable(f"{first}, which {last} continues."))
            if before is None or begun > before[0]:
                runs[run] = begun, replace(own, label=label)
        if len(reasons) == len(found):
            raise ReportError("\n".join([f"None of the {len(found)} runs in {path} can be read:", *reasons]))
        left_out += reasons
    if not runs:
        raise ReportError(f"No run was given; expected {EXPECTED}.")
    return [run for _, run in runs.values()], left_out


def read_run(path: Path) -> LoggedRun:
    """Read one run."""
    return _read(path)[2]


def _files_in(folder: Path) -> list[Path]:
    found = sorted(folder.rglob(NAME))
    if not found:
        raise ReportError(f"{folder} contains no run; expected {EXPECTED}. Name other files one by one.")
    return found


def _read(path: Path) -> tuple[str, float, LoggedRun]:
    """The id of a run, when its file was begun, and the run."""
    try:
        if not path.exists():
            raise ReportError(f"{path} does not exist; expected {EXPECTED}.")
        if not path.is_file():
            raise ReportError(f"{path} is not a run; expected {EXPECTED}.")
        head, lines, is_whole = read_record(path)
        name = "/".join(path.parent.parts[-2:]) if path.name == NAME else path.stem
        run = run_of(name, path, head["config"], lines)
        begun = as_number(head.get("begun"))
        notes = run.notes if is_whole else (*run.notes, NOT_ENDED)
        return head["run"], 0.0 if begun is None else begun, replace(run, notes=notes)
    except ReportError as error:
        raise ReportError(printable(str(error))) from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = shortened(getattr(error, "strerror", None) or str(error), MAX_REASON)
        raise ReportError(printable(f"{path} cannot be read: {reason}. Correct or remove it.")) from error


def run_of(name: str, path: Path, config: Mapping[str, Any], lines: Iterable[Line]) -> LoggedRun:
    """Arrange the lines of a record in one row per round."""
    rows: dict[int, dict[str, float]] = {}
    shown: dict[str, dict[int, Table | Histogram]] = {}
    from_clients: set[str] = set()
    for line in lines:
        round_idx = line["round"]
        trained, evaluated = _numbers(line.get("trained", {})), _numbers(line.get("evaluated", {}))
        if trained or evaluated:
            rows.setdefault(round_idx, {}).update({**trained, **evaluated, ROUND: float(round_idx)})
        from_clients |= trained.keys()
        for own, table in line.get("tables", {}).items():
            shown.setdefault(printable(own), {})[round_idx] = as_table(table["columns"], table["rows"])
        for own, bins in line.get("histograms", {}).items():
            shown.setdefault(printable(own), {})[round_idx] = as_histogram(bins["edges"], bins["counts"])
    if not any(row.keys() - {ROUND} for row in rows.values()):
        raise ReportError(f"{path} has no logged round. Train at least one, or leave this run out.")
    first = min(rows)
    notes = (f"starts at round {first}: what earlier rounds sent is not counted",) if first > 0 else ()
    ordered = tuple(rows[index] for index in sorted(rows))
    return LoggedRun(shortened(printable(name), MAX_NAME), path, config, ordered, shown, frozenset(from_clients), notes)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    found = {printable(name): as_number(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def as_number(value: Any) -> float | None:
    """A value as a number, infinite if it is beyond float32; ``None`` if it is something else.

    Example:
        >>> as_number(0.5), as_number(True), as_number("1"), as_number(-1e300)
        (0.5, None, None, -inf)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return math.copysign(math.inf, value) if abs(value) > LARGEST else float(value)


def as_histogram(edges: Any, counts: Any) -> Histogram:
    """Make a histogram of what a file holds."""
    if len(edges) != len(counts) + 1 or not counts or not all(map(math.isfinite, [*edges, *counts])):
        raise ValueError(f"a histogram has {len(edges)} edges and {len(counts)} counts, which must be finite numbers")
    if sorted(edges) != list(edges) or min(counts) < 0:
        raise ValueError("the edges of a histogram descend, or a count is negative")
    return Histogram(tuple(edges), tuple(counts))


def as_table(columns: Any, rows: Any) -> Table:
    """Make a table of what a file holds; cells that are neither numbers nor texts become texts."""
    if not columns or any(len(row) != len(columns) for row in rows):
        raise ValueError("a row of a table is not as long as its header")
    return Table(tuple(map(str, columns)), tuple(tuple(map(_cell, row)) for row in rows))


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)
