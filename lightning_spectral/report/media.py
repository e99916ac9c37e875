"""Tables and histograms that were logged with a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np


@dataclass(frozen=True)
class LoggedTable:
    """A logged table, whose rows are all as long as ``columns``."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def column(self, name: str) -> list[Any]:
        """All values of one column."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


@dataclass(frozen=True)
class LoggedHistogram:
    """A logged histogram; its edges ascend."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(frozen=True)
class LeftOut:
    """A logged table or histogram that cannot be read, and why."""

    reason: str


Media: TypeAlias = LoggedTable | LoggedHistogram


def as_histogram(edges: Any, counts: Any) -> LoggedHistogram:
    """Make a histogram of what a file holds."""
    numbers = np.array([*edges], dtype=np.float64), np.array([*counts], dtype=np.float64)
    left_to_right, each = numbers
    if not all(np.isfinite(one).all() for one in numbers) or len(left_to_right) != len(each) + 1 or not len(each):
        raise ValueError(f"a histogram has {len(edges)} edges and {len(counts)} counts, which must be finite numbers")
    if (np.diff(left_to_right) < 0).any() or (each < 0).any():
        raise ValueError("the edges of a histogram descend, or a count is negative")
    return LoggedHistogram(tuple(left_to_right.tolist()), tuple(each.tolist()))


def as_table(columns: Any, rows: Any) -> LoggedTable:
    """Make a table of what a file holds; cells that are neither numbers nor texts become texts."""
    if not isinstance(columns, list | tuple) or not all(isinstance(row, list | tuple) for row in [columns, *rows]):
        raise ValueError("a table has no list of columns and of rows")
    if not columns or any(len(row) != len(columns) for row in rows):
        raise ValueError("a row of a table is not as long as its header")
    return LoggedTable(tuple(map(str, columns)), tuple(tuple(map(_scalar, row)) for row in rows))


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, str | int | float) else str(value)
