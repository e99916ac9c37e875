"""``python -m lightning_spectral report``: from runs on the disk to a page that needs no account and no network."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lightning_spectral.errors import ReportError, from_extra
from lightning_spectral.report.compared import SWEEP, group_runs, in_order
from lightning_spectral.report.measures import choose_metric, lower_is_better
from lightning_spectral.report.runs import labelled, printable, read_runs
from lightning_spectral.tables import html_table

if TYPE_CHECKING:
    from lightning_spectral.report.sections import Section

DESCRIPTION = """\
Write one HTML page on federated runs: an evaluation metric against megabytes and rounds, clients, coverage, spectra,
and where the time went. It reads what runs left on the disk:

  lightning_logs/version_0/rounds.jsonl   what RoundHistory, RoundDashboard, `fit` and `sweep` write, a line per round
  a folder                                all such files in it

Runs whose settings differ only in their seeds form one group, drawn as a mean with a band; or name the groups, as in
`report fedavg=runs/a ours=runs/b`.
Of a run that was resumed in another folder, the last file counts.
"""
NUMBER = r"-?[0-9.]+(e[-+]?[0-9]+)?"
# Even if a name in a run smuggled in something, a browser would neither load nor execute it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, by default with the arguments of this process; 1 if there is no report, 0 otherwise."""
    name, layout = "python -m lightning_spectral report", RawDescriptionHelpFormatter
    parser = ArgumentParser(name, description=DESCRIPTION, formatter_class=layout)
    add = parser.add_argument
    runs = "a run or a folder of runs; those with a label are one group"
    add("runs", nargs="+", type=_path, metavar="[LABEL=]RUN", help=runs)
    add("-o", "--output", type=_path, default=Path("report.html"), help="the page to write (default: %(default)s)")
    add("--metric", help="evaluation metric (default: an accuracy or the like that all runs have, otherwise a loss)")
    add("--target", type=float, metavar="VALUE", help="also report the cost of reaching this value of the metric")
    add("--mode", choices=("min", "max"), help="whether lower or higher is better (default: by its name)")
    add("--group-by", nargs="+", default=(), metavar="SETTING", help="settings that define the groups, e.g. keep_ratio")
    add("--png", type=_path, metavar="FOLDER", help="also write each figure there as a PNG file")
    add("--title", help="title of the page")
    try:
        written = write_report(**vars(parser.parse_args(argv)))
    except (ModuleNotFoundError, ReportError) as error:
        print("\n".join(map(printable, f"error: {error}".split("\n"))), file=sys.stderr)
        return 1
    print("\n".join(printable(f"wrote {path}") for path in written))
    return 0


def _path(text: str) -> Path:
    if not text:  # as from a variable of the shell that is not set; `Path` would take it for the current folder
        raise ArgumentTypeError("the path is empty")
    return Path(text)


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
    """Read runs, write a page on them and return the files that were written; the arguments are those of the command.

    Missing folders are created.
    """
    with from_extra("report"):
        from lightning_spectral.report.sections import Contents, all_sections

    output, png, paths = Path(output), Path(png) if png else None, list(map(Path, runs))
    if mode not in (None, "min", "max"):
        raise ReportError(f"`mode` must be 'min', 'max' or None, got {mode!r}.")
    try:
        if output.is_dir():
            raise ReportError(
                f"{output} is a folder, but the page is one file: name it, as in {output / 'report.html'}."
            )
        if output.exists() and not output.is_file():
            raise ReportError(f"{output} is not an ordinary file, so no page can be written to it. Choose another.")
        if output.suffix not in (".html", ".htm"):
            raise ReportError(
                f"The page is written as HTML, so its name must end in .html; got {output}. Browsers print PDF."
            )
        for folder in [output.parent, png] if png else [output.parent]:
            if blocking := [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]:
                raise ReportError(f"{folder} cannot be a folder: {blocking[0]} is a file. Choose another.")
        with np.errstate(all="ignore"):  # differences of infinite values are NaN, which figures leave out
            found, left_out = read_runs(paths)
            metric, read, without = choose_metric(found, metric, {path for _, path in map(labelled, paths)})
            groups, names = group_runs(read, group_by)
            minimise = mode == "min" if mode else lower_is_better(metric)
            sections = all_sections(Contents(in_order(groups, metric), metric, minimise, target))
            sizes = sorted({len(group.runs) for group in groups})
            each = " to ".join(map(str, sizes[:1] + sizes[1:][-1:])) + (" run" if sizes == [1] else " runs")
            listed = ", ".join(f"`{name.removeprefix(SWEEP)}`" for name in names) if len(groups) > 1 else ""
            differ = f", which differ in {listed}" if listed else ""
            summary = f"{len(groups)} {'group' if len(groups) == 1 else 'groups'} of {each} each{differ}."
            warnings = [f"Left out: {reason}" for reason in (*left_out, *without)]
            warnings += [f"{run.name} ({run.path.name}): {'; '.join(run.notes)}." for run in read if run.notes]
            title = title or f"{metric} of {len(read)} federated {'run' if len(read) == 1 else 'runs'}"
            output.parent.mkdir(parents=True, exist_ok=True)
            here = files("lightning_spectral.report")
            style, blank = (here.joinpath(name).read_text(encoding="utf-8") for name in ("style.css", "page.html"))
            told = [_paragraph(summary), *(_paragraph(text, "warning") for text in warnings)]
            body = "\n".join([*told, *map(_section, sections)])
            text = blank.format(policy=POLICY, title=escape(title), style=style, body=body)
            output.write_text("\n".join(map(printable, text.split("\n"))), encoding="utf-8")
            if png is None:
                return [output]
            png.mkdir(parents=True, exist_ok=True)
            return [output, *(section.picture.write_png(png) for section in sections if section.picture)]
    except OSError as error:
        raise ReportError(f"{error.filename or output} cannot be written: {error.strerror}. Choose another.") from error


def _section(section: Section) -> str:
    parts = [_paragraph(section.remark, "remark"), _paragraph(section.lead, "faint")]
    number = re.compile(rf"{NUMBER}( ± {NUMBER})?( \(\d+ of \d+\))?")  # maybe with a deviation, or known of some runs
    if section.picture:
        parts.append(f"<figure>\n{section.picture.svg()}\n</figure>")
    for index, (caption, table) in enumerate(section.tables):
        opened = " open" if index < section.num_open else ""
        rows = [["" if value is None else str(value) for value in row] for row in table.rows]
        numeric = [all(map(number.fullmatch, filter(None, column))) for column in zip(*rows, strict=True)]
        # columns of nothing but numbers are aligned right, with their titles
        shown = html_table([table.columns, *rows], [" class=number" if is_number else "" for is_number in numeric])
        body = f'<div class="table" tabindex="0">{shown}</div>'
        parts.append(f"<details{opened}><summary>{escape(caption)}</summary>\n{body}\n</details>")
    return "\n".join(filter(None, ["<section>", f"<h2>{escape(section.title)}</h2>", *parts, "</section>"]))


def _paragraph(text: str, style: str = "") -> str:
    """A paragraph in which texts between backticks are code; none if there is no text."""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return text and (f'<p class="{style}">{marked}</p>' if style else f"<p>{marked}</p>")
