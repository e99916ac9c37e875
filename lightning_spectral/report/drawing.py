"""Turns a figure into SVG to embed in a page, and into a PNG file."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from lightning_spectral.report.printed import legend_above
from lightning_spectral.report.style import PRINTED, Theme, settings

# A page takes its colours from its style sheet: these stand in for them in a figure and are replaced in its SVG.
PAGE = Theme(ink="#010203", grid="#040506", paper="#070809")
REPLACED = {PAGE.ink: "currentColor", PAGE.grid: "var(--grid)", PAGE.paper: "var(--paper)"}
INCHES = {"wide": 8.0, "narrow": 3.7}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


class Canvas:
    """A figure to draw on; a narrow one is as wide as a phone, with one panel below another."""

    def __init__(self, figure: Figure, theme: Theme, narrow: bool) -> None:
        self.figure, self.theme, self.narrow = figure, theme, narrow
        self.tips: dict[str, str] = {}  # by the id of the artist

    def tip(self, artist: Artist, text: str) -> None:
        """Show a text while a pointer rests on an artist."""
        name = f"tip{len(self.tips)}"
        artist.set_gid(name)
        self.tips[name] = text

    def legend(self, columns: int = 3, narrow_columns: int = 1) -> None:
        """One legend for all panels, above them, if anything has a label."""
        legend_above(self.figure, narrow_columns if self.narrow else columns)


class Size(NamedTuple):
    """Height of a figure in inches, when wide and when narrow."""

    wide: float
    narrow: float


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn in several widths and themes."""

    name: str  # of its file, without a suffix
    description: str  # for readers who cannot see it
    draw: Callable[[Canvas], None] = field(repr=False)
    size: Size

    def svg(self) -> str:
        """The figure in both widths; a style sheet shows the one that fits."""
        return "\n".join(self._svg(width) for width in INCHES)

    def write_png(self, folder: Path) -> Path:
        """Write the wide version, in the theme for print, to ``<folder>/<name>.png``."""
        path = folder / f"{self.name}.png"
        with _drawing(PRINTED):
            self._drawn("wide", PRINTED).figure.savefig(path, dpi=200, metadata={"Software": None})
        return path

    def _drawn(self, width: str, theme: Theme) -> Canvas:
        figure = Figure(figsize=(INCHES[width], getattr(self.size, width)), layout="constrained")
        canvas = Canvas(figure, theme, width == "narrow")
        self.draw(canvas)
        return canvas

    def _svg(self, width: str) -> str:
        with _drawing(PAGE):
            canvas, file = self._drawn(width, PAGE), io.StringIO()
            canvas.figure.savefig(file, format="svg", transparent=True, dpi=150, metadata=NO_METADATA)
        text = file.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
        for name, tip in canvas.tips.items():
            text = text.replace(f'<g id="{name}">', f'<g id="{name}"><title>{escape(tip)}</title>')
        return _as_part(
            text, f"{self.name}-{width}", f'class="{width}" role="img" aria-label="{escape(self.description)}"'
        )


@contextmanager
def _drawing(theme: Theme) -> Iterator[None]:
    """Matplotlib's settings for a theme, without its remarks on what runs may hold.

    It lacks glyphs of some scripts, which a browser has, and gives up on a layout when names take all the room.
    """
    with matplotlib.rc_context(settings(theme)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from|.*layout not applied", category=UserWarning)
        yield


def _as_part(text: str, prefix: str, attributes: str) -> str:
    """SVG with ids that are unique in the page, in a size and colours that the page decides."""
    text = re.sub(r"<[^<>]+>", lambda tag: _as_own_tag(tag[0], prefix), text)  # names between tags stay as they are
    for _ in ("width", "height"):
        text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    return text.replace("<svg", f"<svg {attributes}", 1)


def _as_own_tag(tag: str, prefix: str) -> str:
    tag = re.sub(r'\bid="', f'id="{prefix}-', tag)
    tag = re.sub(r'(href="|url\()#', rf"\g<1>#{prefix}-", tag)
    for colour, replacement in REPLACED.items():
        tag = tag.replace(colour, replacement)
    return re.sub(r"font: ([0-9.]+)px [^;\"]*", r"font-size: \1px", tag)
