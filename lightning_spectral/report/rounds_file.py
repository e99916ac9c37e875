"""``rounds.jsonl``, the record of a run, of which training writes a line per round: all that a report reads.

The first line says which run it is: ``{"run": ..., "begun": ..., "config": {...}}``, with an id that a resumed run
keeps, the time, and the settings. Every other line belongs to a round:

- ``{"round": 3, "trained": {...}, "evaluated": {...}}``: metrics of the round itself, and those logged after it.
- ``{"round": 3, "tables": {...}, "histograms": {...}}``: what `RoundDashboard` shows, by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAME = "rounds.jsonl"
Line = Mapping[str, Any]


class Record(NamedTuple):
    """The contents of a file.

    Attributes:
        head: The first line.
        lines: The others, in order; those of a round need not be adjacent.
        is_whole: Whether the last line ends; one that was cut off, as by a kill, is left out.
    """

    head: Line
    lines: Sequence[Line]
    is_whole: bool


def read_record(path: Path) -> Record:
    """Read a record.

    Raises:
        OSError: If there is no such file.
        ValueError: If it is something else; the message says what is wrong with it.
    """
    *whole, rest = path.read_bytes().split(b"\n")
    head, *lines = [_parsed(number, text) for number, text in enumerate(whole, start=1)] or [{}]
    if not isinstance(head.get("run"), str) or not isinstance(head.get("config"), dict):
        raise ValueError("its first line does not say which run it is")
    for number, line in enumerate(lines, start=2):
        if type(round_idx := line.get("round")) is not int or round_idx < 0:
            raise ValueError(f"line {number} has the round {round_idx!r}; rounds are numbered 0, 1, 2, ...")
    return Record(head, lines, is_whole=not rest)


def _parsed(number: int, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"line {number} is a {type(found).__name__}, not an object")
    return found


def write_record(path: Path, run: str, config: Mapping[str, Any], lines: Iterable[Line]) -> None:
    """Write a whole record at once, in place of an earlier one; missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")  # renamed when it is whole
    head = {"run": run, "begun": time.time(), "config": config}
    part.write_text("".join(map(_text, [head, *lines])), encoding="utf-8")
    part.replace(path)


def append_line(path: Path, line: Line) -> None:
    """Add a line at the end of a record."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_text(line))


def _text(line: Line) -> str:
    return json.dumps(line) + "\n"
