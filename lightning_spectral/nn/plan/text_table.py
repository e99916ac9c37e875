"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain-text table with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
