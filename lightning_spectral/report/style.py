"""One look for all figures: colours that colour-blind readers can tell apart, and markers that match them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

# Okabe and Ito's colours, without black, which is used for text, and yellow, which is hard to see on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: 42 groups look different
GREY = "#808080"  # of the baseline; it can be seen on white and on black
WIDTHS = (2.6, 2.0, 1.5, 1.1)
HEAT = "viridis"
FONT_POINTS = 9.0


@dataclass(frozen=True)
class Theme:
    """Colours of everything but the data."""

    ink: str  # text and axes
    grid: str
    paper: str  # lines between areas that touch


PRINTED = Theme(ink="#1a1a1a", grid="#d5d5d5", paper="#ffffff")


class Look(NamedTuple):
    """The look of one group in all figures."""

    colour: str
    marker: str
    width: float


BASELINE = Look(PRINTED.ink, "*", 1.6)  # what others are compared with


def look(index: int) -> Look:
    """Colour, marker and line width of the group at a position; thinner lines are drawn on top of wider ones."""
    return Look(COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], WIDTHS[min(index, len(WIDTHS) - 1)])


def baseline_look(index: int) -> Look:
    """The look of the baseline at a position: the same colour for all, so that it is the same on every page."""
    return look(index)._replace(colour=GREY)


def settings(theme: Theme) -> Any:
    """Matplotlib's settings for a theme."""
    return {
        "font.size": FONT_POINTS,
        "axes.titlesize": FONT_POINTS,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.labelcolor": theme.ink,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "svg.fonttype": "none",  # text stays text: it can be searched, and uses the reader's fonts
        "svg.hashsalt": "report",  # the same runs make the same file
    }
