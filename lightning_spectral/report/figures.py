"""The figures of a report, as SVG to embed in a page and as PNG files, and what several of them draw."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lightning_spectral.report.compared import Group
from lightning_spectral.report.measures import Curve, Numbers, band
from lightning_spectral.report.printed import (
    GREY,
    PRINTED,
    Look,
    Theme,
    as_label,
    draw_line,
    draw_spread,
    in_lines,
    legend_above,
    legend_lines,
    log_axis,
    look,
    round_axis,
    settings,
)
from lightning_spectral.report.runs import LoggedRun

# A page takes its colours from its style sheet: these stand in for them in a figure and are replaced in its SVG.
PAGE = Theme(ink="#010203", grid="#040506", paper="#070809")
REPLACED = {PAGE.ink: "currentColor", PAGE.grid: "var(--grid)", PAGE.paper: "var(--paper)"}
INCHES, LEGEND_COLUMNS = {"wide": 8.0, "narrow": 3.7}, {"wide": 3, "narrow": 1}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
LOG_FROM = 20  # costs that span more than this factor get a logarithmic axis
OfRun = Callable[[LoggedRun], Curve | None]


@dataclass
class Canvas:
    """A figure to draw on; a narrow one is as wide as a phone, with one panel below another."""

    figure: Figure
    theme: Theme
    width: str
    tips: dict[str, str] = field(default_factory=dict)  # by the id of the artist

    @property
    def is_narrow(self) -> bool:
        """Whether there is room for one panel side by side."""
        return self.width == "narrow"

    def tip(self, artist: Artist, text: str) -> None:
        """Show a text while a pointer rests on an artist."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text

    def panels(self, number: int, columns: int = 0, **shared: Any) -> list[Axes]:
        """Add panels side by side, or one below another if the canvas is narrow."""
        ncols = 1 if self.is_narrow else min(columns or number, number)
        grid = self.figure.subplots(-(-number // ncols), ncols, squeeze=False, **shared)
        for unused in grid.flat[number:]:
            unused.remove()
        return list(grid.flat[:number])

    def label_values(self, axes: Sequence[Axes], label: str) -> None:
        """Label the axis that panels share, next to the first panel of each row."""
        for panel in axes if self.is_narrow else axes[:1]:
            panel.set_ylabel(as_label(label))

    def legend(self) -> None:
        """One legend for all panels, above them, if anything has a label."""
        legend_above(self.figure, LEGEND_COLUMNS[self.width])


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn in several widths and themes."""

    name: str  # of its file, without a suffix
    description: str  # for readers who cannot see it
    draw: Callable[[Canvas], None] = field(repr=False)
    heights: tuple[float, float]  # in inches, when wide and when narrow, without the legend
    labels: Sequence[str] = ()  # of the legend above it

    def svg(self) -> str:
        """The figure in both widths; a style sheet shows the one that fits."""
        return "\n".join(self._svg(width) for width in INCHES)

    def write_png(self, folder: Path) -> Path:
        """Write the wide version, in the theme for print, to ``<folder>/<name>.png``."""
        path = folder / f"{self.name}.png"
        with _drawing(PRINTED):
            self.drawn("wide", PRINTED).figure.savefig(path, dpi=200, metadata={"Software": None})
        return path

    def drawn(self, width: str, theme: Theme) -> Canvas:
        """Draw it in one width and theme."""
        inches, height = INCHES[width], self.heights[width == "narrow"]
        height += 0.2 * legend_lines(self.labels, LEGEND_COLUMNS[width], inches) if self.labels else 0.0
        canvas = Canvas(Figure(figsize=(inches, height), layout="constrained"), theme, width)
        self.draw(canvas)
        return canvas

    def _svg(self, width: str) -> str:
        with _drawing(PAGE):
            canvas, file = self.drawn(width, PAGE), io.StringIO()
            canvas.figure.savefig(file, format="svg", transparent=True, dpi=150, metadata=NO_METADATA)
        text = file.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        for name, tip in canvas.tips.items():
            text = text.replace(f'<g id="{name}">', f'<g id="{name}"><title>{escape(tip)}</title>')
        text = re.sub(r"<[^<>]+>", lambda tag: _embedded(tag[0], f"{self.name}-{width}"), text)  # tags, not texts
        attributes = f'class="{width}" role="img" aria-label="{escape(self.description)}"'
        for _ in ("width", "height"):  # the page decides
            text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
        return text.replace("<svg", f"<svg {attributes}", 1)


@contextmanager
def _drawing(theme: Theme) -> Iterator[None]:
    """Matplotlib's settings for a theme, without its remarks on what runs may hold.

    It lacks glyphs of some scripts, which a browser has, and gives up on a layout when names take all the room.
    """
    with matplotlib.rc_context(settings(theme)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from|.*layout not applied", category=UserWarning)
        yield


def _embedded(tag: str, prefix: str) -> str:
    """A tag with ids that are unique in the page, in its colours and font."""
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    tag = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", tag)
    for colour, replacement in REPLACED.items():
        tag = tag.replace(colour, replacement)
    return re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", tag)


def look_of(group: Group) -> Look:
    """The look of a group; FedAvg, with which others are compared, is grey on every page."""
    return look(group.index)._replace(colour=GREY) if group.is_baseline else look(group.index)


def draw_band(axes: Axes, group: Group, found: Curve, x: Numbers) -> None:
    """Draw a mean with its band. Overlapping curves stay visible: later ones are thinner, with other marks."""
    draw_line(axes, x, found.values, look_of(group), group.label, first_mark=group.index)
    if found.std is not None and found.std.any():
        draw_spread(axes, x, found.values - found.std, found.values + found.std, look_of(group))


def cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """Set up an axis of megabytes, logarithmic if they span a wide range."""
    axes.set_xlabel("megabytes sent, both ways, all clients")
    positive = [cost for cost in costs if cost > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        log_axis(axes)


class Panel(NamedTuple):
    """The contents of one panel over rounds."""

    title: str
    of: OfRun
    dotted: OfRun | None = None  # what was expected
    limits: tuple[float, float | None] | None = None  # of the axis


def over_rounds(
    name: str, description: str, groups: Sequence[Group], shown: Sequence[Panel], label: str = "", **shared: Any
) -> Picture:
    """A picture with one curve of each group, with its band, in each panel."""

    def draw(canvas: Canvas) -> None:
        axes = canvas.panels(len(shown), columns=3, **shared)
        for panel, one in zip(axes, shown, strict=True):
            for group in groups:
                if (found := band(group.each(one.of))) is not None:
                    draw_band(panel, group, found, found.rounds + 1)
                if one.dotted is not None and (expected := band(group.each(one.dotted))) is not None:
                    panel.plot(expected.rounds + 1, expected.values, ls=":", color=look_of(group).colour)
            panel.set_title("\n".join(in_lines(one.title, 60)))
            if one.limits is not None:
                panel.set_ylim(*one.limits)
            round_axis(panel)
        canvas.label_values(axes, label)
        canvas.legend()

    heights = 1.0 + 2.4 * -(-len(shown) // 3), 0.6 + 2.3 * len(shown)
    return Picture(name, description, draw, heights, [group.label for group in groups])
