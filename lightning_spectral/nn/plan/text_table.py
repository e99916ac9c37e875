"""Tables of cells: as plain text, and for a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Lines of a plain-text table with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_html(rows: Sequence[Sequence[str]], below: str = "") -> str:
    """The same table as HTML, with the first row as its head, and perhaps a paragraph below it; text is escaped.

    Example:
        >>> print(as_html([["layer", "N"], ["<0>", "8"]]))
        <table><thead><tr><th>layer</th><th>N</th></tr></thead><tbody>
        <tr><td>&lt;0&gt;</td><td>8</td></tr>
        </tbody></table>
    """
    head, *body = (
        f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>"
        for tag, row in zip(["th", *["td"] * len(rows)], rows, strict=False)
    )
    lines = "\n".join([f"<table><thead>{head}</thead><tbody>", *body, "</tbody></table>"])
    return f"{lines}\n<p>{escape(below)}</p>" if below else lines
