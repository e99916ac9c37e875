"""One look for all figures: files of the studies, the examples and the benchmarks, and pictures of a report's page.

Colour-blind readers can tell the colours apart, and markers match them.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from lightning_spectral.report.runs import shortened

# Okabe and Ito's colours, without black, which is used for text, and yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: 42 groups look different
GREY = "#808080"  # of the baseline of a report; it can be seen on white and on black
WIDTHS = (2.6, 2.0, 1.5, 1.1)
FONT_POINTS = 9.0
MARKS = 10  # markers on a curve
LONGEST_LABEL, MAX_LINES, LABEL = 100, 8, 44  # letters of an axis, lines of a label, letters in a line of a legend
LETTER, HANDLE = 5.5, 36.0  # points: of the width of a letter, and of what stands before a label

INK, GRID, PAPER = "#1a1a1a", "#d5d5d5", "#ffffff"  # text and axes; grid; lines between areas that touch
# A page has its own light and dark ones in its style sheet; an image in a file has a style for dark pages.
ON_PAGE = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"}
DARK = {INK: "#e6e6e4", GRID: "#3a3d43", PAPER: "#131416"}
DARK_STYLE = "\n".join(
    f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
    for light, dark in DARK.items()
    for what in ("fill", "stroke")
)
INCHES, LEGEND_COLUMNS = 8.0, 3  # of a picture on a page
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
INKED = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "legend.labelcolor", "text.color")
SETTINGS: Any = {  # matplotlib's
    **dict.fromkeys((*INKED, "xtick.color", "ytick.color"), INK),
    "font.size": FONT_POINTS,
    "axes.titlesize": FONT_POINTS,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "svg.fonttype": "none",  # text stays text: it can be searched, and uses the reader's fonts
    "svg.hashsalt": "report",  # the same runs make the same file
}


class Look(NamedTuple):
    """The look of one group in all figures."""

    colour: str
    marker: str
    width: float


BASELINE = Look(INK, "*", 1.6)  # what others are compared with


def look(index: int) -> Look:
    """Colour, marker and line width of the group at a position; thinner lines are drawn on top of wider ones."""
    return Look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], WIDTHS[min(index, len(WIDTHS) - 1)])


class NotebookFigure(Figure):
    """A figure without pyplot, which would choose a backend for the process; its last line in a cell displays it."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png")
        return content.getvalue()


@contextmanager
def printed(path: str | Path | None, width: float, height: float) -> Iterator[Figure]:
    """A figure to draw on, in inches, which is written when the block ends, if there is a path; a notebook shows it.

    The suffix of the path decides the format; missing folders are created. An SVG has no background, and is legible on
    light and on dark pages.
    """
    with matplotlib.rc_context(SETTINGS):
        figure = NotebookFigure(figsize=(width, height), layout="constrained")
        yield figure
        if path is None:
            return
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".svg":
            figure.savefig(path, dpi=150, metadata={"Software": None} if path.suffix == ".png" else None)
            return
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, dpi=150, metadata=NO_METADATA)
        style = f"<style>@media (prefers-color-scheme: dark) {{\n{DARK_STYLE}\n}}</style>"
        path.write_text(re.sub(r"(<svg [^>]*>)", rf"\1\n{style}", file.getvalue(), count=1), encoding="utf-8")


def as_label(text: str) -> str:
    """A text for a figure, in which matplotlib finds no formula: `$` is a letter like any other."""
    return shortened(text, LONGEST_LABEL).replace("$", r"\$")


def in_lines(text: str, width: int) -> list[str]:
    """A text for a figure, in a few lines of at most ``width`` letters."""
    return [as_label(line) for line in wrap(text, width, max_lines=MAX_LINES, placeholder=" …")]


def draw_line(axes: Axes, x: Any, y: Any, look: Look, label: str, first_mark: int = 0) -> None:
    """Draw a curve with some markers, which distinguish it where colours cannot."""
    every = max(1, len(x) // MARKS)
    marks = first_mark % every, every
    axes.plot(x, y, color=look.colour, marker=look.marker, markevery=marks, lw=look.width, label=label)


def draw_spread(axes: Axes, x: Any, low: Any, high: Any, look: Look) -> None:
    """Draw the band around a curve."""
    axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0)


def round_axis(axes: Axes) -> None:
    """Set up an axis of rounds, which are whole numbers; the first is 1."""
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))


def log_axis(axes: Axes) -> None:
    """Set up an axis of costs that span decades, with tick labels 1, 2, 5, 10 instead of powers."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")


def legend_above(figure: Figure, columns: int) -> None:
    """One legend for all panels, above them, if anything has a label; long labels are wrapped."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles, strict=True))
    if found:
        labels = ["\n".join(in_lines(label, LABEL)) for label in found]
        fitting = legend_columns(list(found), columns, figure.get_figwidth())
        figure.legend(found.values(), labels, loc="outside upper left", ncols=fitting)


def legend_columns(labels: Sequence[str], columns: int, inches: float) -> int:
    """How many columns of a legend fit side by side, at most ``columns``: what does not fit would be cut off."""
    widest = max(len(line) for label in labels for line in in_lines(label, LABEL))
    return max(1, min(columns, len(labels), int(inches * 72 // (LETTER * widest + HANDLE))))


def panels(figure: Figure, number: int, columns: int = 0, **shared: Any) -> list[Axes]:
    """Add panels to a figure, side by side, so many in a row."""
    ncols = min(columns or number, number)
    grid = figure.subplots(-(-number // ncols), ncols, squeeze=False, **shared)
    for unused in grid.flat[number:]:
        unused.remove()
    return list(grid.flat[:number])


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn for a page and for print."""

    name: str  # of its file, without a suffix
    description: str  # for readers who cannot see it
    draw: Callable[[Figure], None] = field(repr=False)
    height: float  # in inches, without the legend
    labels: Sequence[str] = ()  # of the legend above it

    def svg(self) -> str:
        """The figure for a page."""
        file = io.StringIO()
        self._save(file, format="svg", transparent=True, dpi=150, metadata=NO_METADATA)
        text = file.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        text = re.sub(r"<[^<>]+>", lambda tag: _embedded(tag[0], self.name), text)  # tags, not texts
        for _ in ("width", "height"):  # the page decides
            text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
        return text.replace("<svg", f'<svg role="img" aria-label="{escape(self.description)}"', 1)

    def write_png(self, folder: Path) -> Path:
        """Write the figure for print to ``<folder>/<name>.png``."""
        path = folder / f"{self.name}.png"
        self._save(path, dpi=200, metadata={"Software": None})
        return path

    def _save(self, target: Any, **options: Any) -> None:
        """Draw it in our settings of matplotlib, without its remarks on what runs may hold, and save it."""
        with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
            # It lacks glyphs of some scripts, which a browser has, and gives up on a layout when names take all room.
            warnings.filterwarnings("ignore", "Glyph .* missing from|.*layout not applied", UserWarning)
            self.drawn().savefig(target, **options)

    def drawn(self) -> Figure:
        """Draw it, with one legend for all panels above them."""
        height = self.height
        if labels := self.labels:  # the legend is filled column by column
            rows = -(-len(labels) // legend_columns(labels, LEGEND_COLUMNS, INCHES))
            lines = [len(in_lines(label, LABEL)) for label in labels]
            height += 0.2 * max(sum(lines[start : start + rows]) for start in range(0, len(lines), rows))
        figure = Figure(figsize=(INCHES, height), layout="constrained")
        self.draw(figure)
        return figure


def _embedded(tag: str, prefix: str) -> str:
    """A tag with ids that are unique in the page, in its colours and font."""
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    tag = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", tag)
    for colour, replacement in ON_PAGE.items():
        tag = tag.replace(colour, replacement)
    return re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", tag)
