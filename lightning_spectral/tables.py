"""Tables of cells between lines of text: as plain text, and as HTML for a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

Rows: TypeAlias = Sequence[Sequence[str]]  # the first row is the head
Block: TypeAlias = Rows | str  # a table, or lines of text


def aligned(rows: Rows) -> Iterable[str]:
    """Lines of a plain-text table with columns padded to equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def as_text(blocks: Iterable[Block]) -> str:
    """Blocks as plain text, with an empty line between them."""
    return "\n\n".join(block if isinstance(block, str) else "\n".join(aligned(block)) for block in blocks)


def as_html(blocks: Iterable[Block]) -> str:
    """The same blocks as HTML, for the ``_repr_html_`` that notebooks call; all text is escaped.

    Example:
        >>> print(as_html([[["layer", "N"], ["<0>", "8"]], "1 layer"]))
        <table><thead><tr><th>layer</th><th>N</th></tr></thead><tbody>
        <tr><td>&lt;0&gt;</td><td>8</td></tr>
        </tbody></table>
        <p>1 layer</p>
    """
    return "\n".join(
        f"<p>{'<br>'.join(map(escape, block.splitlines()))}</p>" if isinstance(block, str) else html_table(block)
        for block in blocks
    )


def html_table(rows: Rows, styles: Sequence[str] = ()) -> str:
    """A table as HTML, with the attributes of the cells of each column; all text is escaped."""
    tags = ["th", *["td"] * (len(rows) - 1)]
    styles = styles or [""] * len(rows[0])
    head, *body = (
        f"<tr>{''.join(f'<{tag}{style}>{escape(cell)}</{tag}>' for cell, style in zip(row, styles, strict=True))}</tr>"
        for tag, row in zip(tags, rows, strict=True)
    )
    return "\n".join([f"<table><thead>{head}</thead><tbody>", *body, "</tbody></table>"])


class Tabular(ABC):
    """Base of what prints as tables, and shows them in a notebook."""

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    @abstractmethod
    def _blocks(self) -> Sequence[Block]:
        """Its tables, and the lines between them."""
