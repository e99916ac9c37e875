"""The page: self-contained HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.sections import Section
from lightning_spectral.report.texts import printable

NUMBER = r"-?[0-9.]+(e[-+]?[0-9]+)?"
# Even if a name in a run smuggled in something, a browser would neither load nor execute it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(title: str, summary: Sequence[str], warnings: Sequence[str], sections: Sequence[Section]) -> str:
    """Make a complete HTML document; the summary and the warnings are paragraphs below its title."""
    style = (files("lightning_spectral.report") / "style.css").read_text(encoding="utf-8")
    body = [
        f"<h1>{escape(title)}</h1>",
        *(_paragraph(text) for text in summary),
        *(_paragraph(text, "warning") for text in warnings),
        *map(_section, sections),
        "<footer>Made by <code>python -m lightning_spectral report</code>. This page loads nothing and has no script; "
        "rest a pointer on a mark to see its numbers.</footer>",
    ]
    lines = "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )
    return "\n".join(map(printable, lines.split("\n")))


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.remark:
        parts.append(_paragraph(section.remark, "remark"))
    if section.lead:
        parts.append(_paragraph(section.lead, "faint"))
    if section.picture:
        parts.append(f"<figure>\n{section.picture.svg()}\n</figure>")
    parts += [_details(*table, index < section.num_open) for index, table in enumerate(section.tables)]
    return "<section>\n" + "\n".join(parts) + "\n</section>"


def _paragraph(text: str, style: str = "") -> str:
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<p class="{style}">{marked}</p>' if style else f"<p>{marked}</p>"


def _details(caption: str, table: LoggedTable, is_open: bool) -> str:
    numeric = [all(map(_is_number, filter(None, column))) for column in zip(*table.rows, strict=True)]
    head = "".join(
        f"<th{' class=number' if number else ''}>{escape(str(name))}</th>"
        for name, number in zip(table.columns, numeric or [False] * len(table.columns), strict=True)
    )
    rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    body = f"<table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>"
    scrolling = f'<div class="table" tabindex="0">{body}</div>'
    return f"<details{' open' if is_open else ''}><summary>{escape(caption)}</summary>\n{scrolling}\n</details>"


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return f"<td{' class=number' if _is_number(text) else ''}>{escape(text)}</td>"


def _is_number(value: Any) -> bool:
    """Whether a cell is a number, which may have a deviation."""
    return re.fullmatch(rf"{NUMBER}( ± {NUMBER})?", str(value)) is not None
