"""From runs on the disk to a page, which is self-contained HTML, and its figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from lightning_spectral.errors import ReportError
from lightning_spectral.report.compared import in_order
from lightning_spectral.report.groups import SWEEP, Group, group_runs
from lightning_spectral.report.measures import choose_metric, lower_is_better, with_metric
from lightning_spectral.report.runs import Table, labelled, read_runs
from lightning_spectral.report.sections import Contents, Section, all_sections
from lightning_spectral.report.texts import printable

NUMBER = r"-?[0-9.]+(e[-+]?[0-9]+)?"
# Even if a name in a run smuggled in something, a browser would neither load nor execute it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(
    runs: Sequence[str | Path],
    output: str | Path,
    *,
    metric: str | None = None,
    mode: str | None = None,
    group_by: Sequence[str] = (),
    png: str | Path | None = None,
    title: str | None = None,
    target: float | None = None,
) -> list[Path]:
    """Read runs and write a page on them.

    Args:
        runs: Files of runs, or folders of them, each maybe as ``label=path``: runs with the same label are one group.
            Of a run that was resumed in another folder, only the last file is read.
        output: The HTML file to write; missing folders are created.
        metric: The evaluation metric; by default the most telling one that all runs have.
        mode: ``"min"`` or ``"max"``: whether lower or higher values are better; by default its name decides.
        group_by: Settings by which runs are grouped; by default all in which they differ, except seeds.
        png: A folder to which each figure is written as a PNG file; none are written by default.
        title: Title of the page.
        target: A value of the metric; the page says what it costs each group to reach it.

    Returns:
        The files that were written.
    """
    output, png = Path(output), Path(png) if png else None
    if mode not in (None, "min", "max"):
        raise ReportError(f"`mode` must be 'min', 'max' or None, got {mode!r}.")
    try:
        _check_destinations(output, png)
        with np.errstate(all="ignore"):  # differences of infinite values are NaN, which figures leave out
            found, left_out = read_runs(map(Path, runs))
            read, without = with_metric(found, metric, {path for _, path in map(labelled, map(Path, runs))})
            chosen = choose_metric(read, metric)
            groups, names = group_runs(read, group_by)
            minimise = mode == "min" if mode else lower_is_better(chosen)
            sections = all_sections(Contents(in_order(groups, chosen), chosen, minimise, target))
            reasons = [f"Left out: {reason}" for reason in (*left_out, *without)]
            notes = [f"{run.name} ({run.path.name}): {'; '.join(run.notes)}." for run in read if run.notes]
            title = title or f"{chosen} of {_counted(len(read), 'federated run')}"
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(page(title, _summary(groups, names), reasons + notes, sections), encoding="utf-8")
            if png is None:
                return [output]
            png.mkdir(parents=True, exist_ok=True)
            return [output, *(section.picture.write_png(png) for section in sections if section.picture)]
    except OSError as error:
        raise ReportError(f"{error.filename or output} cannot be written: {error.strerror}. Choose another.") from error


def _check_destinations(output: Path, png: Path | None) -> None:
    if output.is_dir():
        raise ReportError(f"{output} is a folder, but the page is one file: name it, as in {output / 'report.html'}.")
    if output.exists() and not output.is_file():
        raise ReportError(f"{output} is not an ordinary file, so no page can be written to it. Choose another.")
    if output.suffix not in (".html", ".htm"):
        raise ReportError(
            f"The page is written as HTML, so its name must end in .html; got {output}. Browsers print PDF."
        )
    folders = [output.parent, png] if png else [output.parent]
    for folder in folders:
        if blocking := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
            raise ReportError(f"{folder} cannot be a folder: {blocking[0]} is a file. Choose another.")


def _summary(groups: Sequence[Group], names: Sequence[str]) -> str:
    sizes = sorted({len(group.runs) for group in groups})
    repeated = f"{sizes[0]} to {sizes[-1]} runs each" if len(sizes) > 1 else f"{_counted(sizes[0], 'run')} each"
    differ = (
        f", which differ in {', '.join(f'`{name.removeprefix(SWEEP)}`' for name in names)}"
        if names and len(groups) > 1
        else ""
    )
    return f"{_counted(len(groups), 'group')} of {repeated}{differ}."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def page(title: str, summary: str, warnings: Sequence[str], sections: Sequence[Section]) -> str:
    """Make a complete HTML document; the summary and the warnings are paragraphs below its title."""
    style = (files("lightning_spectral.report") / "style.css").read_text(encoding="utf-8")
    body = "\n".join(
        [_paragraph(summary), *(_paragraph(text, "warning") for text in warnings), *map(_section, sections)]
    )
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
<footer>Made by <code>python -m lightning_spectral report</code>. This page loads nothing and has no script; \
rest a pointer on a mark to see its numbers.</footer>
</main>
</body>
</html>
"""
    return "\n".join(map(printable, text.split("\n")))


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


def _details(caption: str, table: Table, is_open: bool) -> str:
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
