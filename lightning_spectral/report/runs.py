"""A run as a report sees it: one row of numbers per round, and the tables and histograms that were logged with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from lightning_spectral.errors import ReportError
from lightning_spectral.report.names import BOOKKEEPING, BYTES, ROUND

NOT_ENDED = "the file ends before the run does: it was killed, or is still running"


@dataclass(frozen=True)
class Table:
    """A logged table.

    Attributes:
        columns: Names of the columns.
        rows: One tuple per row, as long as ``columns``.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> list[Any]:
        """All values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True)
class Histogram:
    """A logged histogram.

    Attributes:
        edges: Edges of the bins, ascending, one more than there are bins.
        counts: Number of values in each bin.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]


Media: TypeAlias = Table | Histogram


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: Name given by its author, or that of its folder.
        path: The file that it was read from.
        config: Settings of the run.
        rows: The numbers of each round, ascending by ``fl/round``.
        media: Tables and histograms by name, then by round.
        from_clients: Names of metrics that were logged with the round itself, that is, while clients trained.
        notes: Remarks on the file for readers of the report.
        identity: Something that only files of this run have, such as its wandb id; empty if there is none.
    """

    name: str
    path: Path
    config: Mapping[str, Any]
    rows: tuple[Mapping[str, float], ...]
    media: Mapping[str, Mapping[int, Media]] = field(default_factory=dict)
    from_clients: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    identity: str = ""

    @property
    def names(self) -> set[str]:
        """All metrics that the run has in some round."""
        return {name for row in self.rows for name in row}

    def noting(self, *notes: str) -> Run:
        """The same run with further notes."""
        return replace(self, notes=(*self.notes, *notes))

    def identified(self, identity: str) -> Run:
        """The same run with its identity."""
        return replace(self, identity=identity)


def build_run(name: str, path: Path, config: Mapping[str, Any], logged: Iterable[Mapping[str, Any]]) -> Run:
    """Arrange what was logged, in order, in one row per round.

    Rows without a round belong to that of their epoch, or otherwise to the round before them.

    Args:
        name: Name given by the run's author.
        path: The file that it was read from.
        config: Settings of the run.
        logged: Entries that were written together: numbers, or `Table` and `Histogram`. Anything else is ignored.

    Raises:
        ReportError: If there is no number at all.
    """
    rows: dict[int, dict[str, float]] = {}
    media: dict[str, dict[int, Media]] = {}
    from_clients: set[str] = set()
    round_idx = 0
    for entry in without_prefix(list(logged)):
        numbers = {key: number for key, value in entry.items() if (number := as_number(value)) is not None}
        round_idx = _round_of(numbers, round_idx)
        kept = {key: value for key, value in numbers.items() if key not in BOOKKEEPING and not key.startswith("_")}
        if kept:
            rows.setdefault(round_idx, {ROUND: float(round_idx)}).update(kept)
        if any(key.endswith(BYTES[0]) for key in kept):
            from_clients |= kept.keys()
        for key, value in entry.items():
            if isinstance(value, Table | Histogram):
                media.setdefault(key, {})[round_idx] = value
    if not any(row.keys() - {ROUND} for row in rows.values()):
        raise ReportError(f"{path} holds no logged round. Train at least one, or leave this run out.")
    ordered = tuple(rows[index] for index in sorted(rows))
    return Run(name, path, config, ordered, media, frozenset(from_clients), gaps(ordered))


def without_prefix(logged: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Entries without what a logger's ``prefix`` put before all names.

    Example:
        >>> without_prefix([{"x-fl/round": 0, "x-acc": 0.5, "step": 0}])
        [{'fl/round': 0, 'acc': 0.5, 'step': 0}]
    """
    prefixes = {name.removesuffix(ROUND) for entry in logged for name in entry if name.endswith(f"-{ROUND}")}
    if len(prefixes) != 1:
        return logged
    (prefix,) = prefixes
    return [{name.removeprefix(prefix): value for name, value in entry.items()} for entry in logged]


def as_number(value: Any) -> float | None:
    """A logged value, as loggers write it, as a number; ``None`` if it is not a number.

    Example:
        >>> as_number("0.5"), as_number("NaN"), as_number(True), as_number("")
        (0.5, nan, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def as_cell(text: str) -> str | float:
    """A cell of a table: a number, without decimals if it is whole; any other text, even an empty one, as it is."""
    number = as_number(text)
    if number is None:
        return text
    return int(number) if number.is_integer() else number


def _round_of(numbers: Mapping[str, float], before: int) -> int:
    found = (numbers[name] for name in (ROUND, "epoch") if math.isfinite(numbers.get(name, math.nan)))
    return int(next(found, before))


def gaps(rows: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Remarks for readers on the rounds that are missing in some rows, which ascend."""
    first = rows[0][ROUND]
    return (f"starts at round {first:g}: what earlier rounds sent is not counted",) if first > 0 else ()
