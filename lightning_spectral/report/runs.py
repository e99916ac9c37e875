"""``rounds.jsonl``, the record of a run, of which training writes a line per round, and runs as a report reads them.

The first line says which run it is: ``{"run": ..., "begun": ..., "config": {...}}``, with an id that a resumed run
keeps, the time, and the settings. Every other line belongs to a round:

- ``{"round": 3, "trained": {...}, "evaluated": {...}, "turns": [...]}``: metrics of the round itself, those logged
  after it, and the turns of its clients if a `CommunicationLedger` reads them.
- ``{"round": 3, "tables": {...}, "histograms": {...}}``: what `RoundDashboard` shows, by name.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lightning_spectral.errors import ReportError, writing

NAME, OUTPUT = "rounds.jsonl", "output.txt"  # in the folder of a run: its record, and what it printed
ELSEWHERE = "Choose another folder: Trainer(default_root_dir=...), or RoundHistory(path)."
ROUND = "fl/round"
NOT_ENDED = "the file ends before the run does: it was killed, or is still running"
LARGEST = 3.4028235e38  # of float32; a metric beyond it has diverged, and its square would not be a number
MAX_REASON, MAX_NAME = 500, 200  # letters
EXPECTED = f"a `{NAME}` of `RoundHistory`, or a folder of such runs"
# Line and control characters, halves of surrogate pairs, and those that reverse the order of the text after them.
UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
Line = Mapping[str, Any]


def printable(text: str) -> str:
    """The text in one line, with a replacement for every character that a page, a figure or a terminal cannot show."""
    return UNFIT.sub("\N{REPLACEMENT CHARACTER}", re.sub(r"[\t\n\r]+", " ", text))


def shortened(text: str, letters: int) -> str:
    """The text if it is short enough, otherwise its beginning."""
    return text if len(text) <= letters else f"{text[: letters - 1]}…"


class Record(NamedTuple):
    """The contents of a file."""

    head: Line  # the first line
    lines: Sequence[Line]  # the others, in order; those of a round need not be adjacent
    is_whole: bool  # whether the last line ends; one that was cut off, as by a kill, is left out


def read_record(path: Path) -> Record:
    """Read a record; `OSError` if there is no such file, `ValueError`, with the reason, if it is something else."""
    *whole, rest = path.read_bytes().split(b"\n")
    found = []
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(line, dict):
            raise ValueError(f"line {number} is a {type(line).__name__}, not an object")
        found.append(line)
    head, *lines = found or [{}]
    if not isinstance(head.get("run"), str) or not isinstance(head.get("config"), dict):
        raise ValueError("its first line does not say which run it is")
    for number, line in enumerate(lines, start=2):
        if type(round_idx := line.get("round")) is not int or round_idx < 0:
            raise ValueError(f"line {number} has the round {round_idx!r}; rounds are numbered 0, 1, 2, ...")
    return Record(head, lines, is_whole=not rest)


def write_record(path: Path, run: str, config: Mapping[str, Any], lines: Iterable[Line]) -> None:
    """Write a whole record at once, in place of an earlier one; missing folders are created."""
    part = path.with_name(f"{path.name}.part")  # renamed when it is whole
    head = {"run": run, "begun": time.time(), "config": config}
    with writing(path, ELSEWHERE):
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("".join(json.dumps(line) + "\n" for line in (head, *lines)), encoding="utf-8")
        part.replace(path)


def append_line(path: Path, line: Line) -> None:
    """Add a line at the end of a record."""
    with writing(path, ELSEWHERE), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


class Table(NamedTuple):
    """A table, whose rows are all as long as ``columns``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


class Histogram(NamedTuple):
    """Numbers of values between edges, which ascend; there is one edge more than counts."""

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
    run: str = ""  # its id
    begun: float = 0.0  # when its file was

    @cached_property
    def names(self) -> set[str]:
        """All metrics that the run has in some round."""
        return {name for row in self.rows for name in row}


def labelled(path: Path) -> tuple[str, Path]:
    """Take ``label=path`` apart; anything that exists is a path without a label."""
    label, _, named = str(path).partition("=")
    return (printable(label), Path(named)) if label and named and not os.path.lexists(path) else ("", path)


def read_runs(paths: Iterable[Path]) -> tuple[list[LoggedRun], list[str]]:
    """Read the runs at some paths, each once, and say why files in folders, which are searched, are left out.

    Of a run that was resumed in another folder, only the file that was begun last is read.
    """
    runs: dict[str, LoggedRun] = {}
    left_out: list[str] = []
    for label, path in map(labelled, paths):
        # `Path.is_dir` raises for names that are too long
        found = sorted(path.rglob(NAME)) if os.path.isdir(path) else [path]
        begun = sorted(path.rglob(OUTPUT)) if os.path.isdir(path) else []
        left_out += [printable(f"{o}: failed, or no round yet.") for o in begun if not o.with_name(NAME).exists()]
        if not found:
            raise ReportError(f"{path} contains no run; expected {EXPECTED}. Name other files one by one.")
        reasons = []
        for file in found:
            try:
                own = read_run(file)
            except ReportError as error:
                if len(found) == 1:
                    raise
                reasons.append(str(error))
                continue
            before = runs.get(own.run)
            if before is not None and os.path.realpath(before.path) != os.path.realpath(file):
                first, last = (file, before.path) if own.begun <= before.begun else (before.path, file)
                left_out.append(printable(f"{first}, which {last} continues."))
            if before is None or own.begun > before.begun:
                runs[own.run] = replace(own, label=label)
        if len(reasons) == len(found):
            raise ReportError("\n".join([f"None of the {len(found)} runs in {path} can be read:", *reasons]))
        left_out += reasons
    if not runs:
        raise ReportError(f"No run was given; expected {EXPECTED}.")
    return [*runs.values()], left_out


def read_run(path: Path) -> LoggedRun:
    """Read one run."""
    try:
        if not path.is_file():
            state = "is not a run" if path.exists() else "does not exist"
            raise ReportError(f"{path} {state}; expected {EXPECTED}.")
        head, lines, is_whole = read_record(path)
        depth = 3 if "model" in head["config"].get("sweep", ()) else 2  # of folders: a comparison has several models
        name = "/".join(path.parent.parts[-depth:]) if path.name == NAME else path.stem
        run = run_of(name, path, head["config"], lines)
        notes = run.notes if is_whole else (*run.notes, NOT_ENDED)
        return replace(run, notes=notes, run=head["run"], begun=as_number(head.get("begun")) or 0.0)
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
        for own, content in line.get("tables", {}).items():
            columns, cells = content["columns"], content["rows"]
            if not columns or any(len(row) != len(columns) for row in cells):
                raise ValueError("a row of a table is not as long as its header")
            known = (str, int, float, type(None))  # other cells become texts
            plain = (tuple(cell if isinstance(cell, known) else str(cell) for cell in row) for row in cells)
            shown.setdefault(printable(own), {})[round_idx] = Table(tuple(map(str, columns)), tuple(plain))
        for own, content in line.get("histograms", {}).items():
            edges, counts = content["edges"], content["counts"]
            if len(edges) != len(counts) + 1 or not counts or not all(map(math.isfinite, [*edges, *counts])):
                numbers = f"{len(edges)} edges and {len(counts)} counts"
                raise ValueError(f"a histogram has {numbers}, which must be finite numbers")
            if sorted(edges) != list(edges) or min(counts) < 0:
                raise ValueError("the edges of a histogram descend, or a count is negative")
            shown.setdefault(printable(own), {})[round_idx] = Histogram(tuple(edges), tuple(counts))
    if not any(row.keys() - {ROUND} for row in rows.values()):
        raise ReportError(f"{path} has no logged round. Train at least one, or leave this run out.")
    first = min(rows)
    notes = (f"starts at round {first}: what earlier rounds sent is not counted",) if first > 0 else ()
    ordered = tuple(rows[index] for index in sorted(rows))
    return LoggedRun(shortened(printable(name), MAX_NAME), path, config, ordered, shown, frozenset(from_clients), notes)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {printable(name): number for name, value in values.items() if (number := as_number(value)) is not None}


def as_number(value: Any) -> float | None:
    """A value as a number, infinite if it is beyond float32; ``None`` if it is something else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return math.copysign(math.inf, value) if abs(value) > LARGEST else float(value)
