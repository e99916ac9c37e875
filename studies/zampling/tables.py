"""Cells and tables in Markdown, for both reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

Run = Mapping[str, Any]
Rows = tuple[Sequence[str], Sequence[Sequence[str]]]  # the head of a table, and its rows


def per_cent(values: Sequence[float], digits: int = 1) -> str:
    """Format the mean and, for two or more values, the standard deviation, in per cent."""
    spread = f" ± {100 * stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.{digits}f}{spread}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
