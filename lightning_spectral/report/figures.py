"""The figures of a report, as SVG to embed in a page and as PNG files."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from lightning_spectral.report.compared import group_end, pareto_front
from lightning_spectral.report.groups import Group
from lightning_spectral.report.measures import (
    Band,
    Curve,
    Numbers,
    Spectrum,
    band,
    client_statistics,
    curve,
    mean_stage_seconds,
    megabytes,
    megabytes_at,
    spread,
)
from lightning_spectral.report.printed import draw_line, draw_spread, legend_above, log_axis, round_axis
from lightning_spectral.report.runs import LoggedRun
from lightning_spectral.report.style import COLOURS, HEAT, PRINTED, Theme, settings
from lightning_spectral.report.texts import as_label, in_lines

# A page takes its colours from its style sheet: these stand in for them in a figure and are replaced in its SVG.
PAGE = Theme(ink="#010203", grid="#040506", paper="#070809")
REPLACED = {PAGE.ink: "currentColor", PAGE.grid: "var(--grid)", PAGE.paper: "var(--paper)"}
INCHES = {"wide": 8.0, "narrow": 3.7}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
LOG_FROM = 20  # costs that span more than this factor get a logarithmic axis
GAP = 8.0  # points between the bars of groups that sent the same
SAME = 0.02  # costs are the same if they differ by less than this share of all that is shown
TITLE = 36  # letters that fit above a panel
HATCHES = ("", "///", "...")  # for when the colours repeat
FEW = 6  # rounds that are each marked on the axis
SMALLEST, LARGEST = 1e-4, 0.1  # where the scale of singular values may begin, as shares of the layer's largest
MAX_CELLS = 4_000_000  # of a heat map, which has far fewer pixels; with more, rounds are skipped


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


def panels(canvas: Canvas, number: int, columns: int = 0, stacked: bool = False, **shared: Any) -> list[Axes]:
    """Add panels side by side, or one below another if the canvas is narrow or ``stacked`` is set."""
    ncols = 1 if canvas.narrow or stacked else min(columns or number, number)
    grid = canvas.figure.subplots(-(-number // ncols), ncols, squeeze=False, **shared)
    for unused in grid.flat[number:]:
        unused.remove()
    return list(grid.flat[:number])


def draw_band(axes: Axes, group: Group, found: Band, x: Numbers) -> None:
    """Draw a mean with its band. Overlapping curves stay visible: later ones are thinner, with other marks."""
    own = group.look
    draw_line(axes, x, found.mean, own, group.label, first_mark=group.index)
    if found.std.any():
        draw_spread(axes, x, found.mean - found.std, found.mean + found.std, own)


def value_axis(canvas: Canvas, axes: Sequence[Axes], label: str) -> None:
    """Label the axis that panels share, next to the first panel of each row."""
    for panel in axes if canvas.narrow else axes[:1]:
        panel.set_ylabel(as_label(label))


def cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """Set up an axis of megabytes, logarithmic if they span a wide range."""
    axes.set_xlabel("megabytes sent, both ways, all clients")
    positive = [cost for cost in costs if cost > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        log_axis(axes)


def pareto(canvas: Canvas, groups: Sequence[Group], metric: str, minimise: bool) -> None:
    """Draw every run's last evaluation against what was sent until then; below it, the spread over clients."""
    with_clients = any(spread(run, metric) for group in groups for run in group.runs)
    axes = panels(canvas, 2 if with_clients else 1, stacked=True, sharex=True)
    ends = [group_end(group, metric).points for group in groups]
    means = np.array([points.mean(axis=0) for points in ends])
    for group, points in zip(groups, ends, strict=True):
        _points(canvas, axes[0], group, points)
    if with_clients:
        for group, x, shift in zip(groups, means[:, 0], shifts(means[:, 0]), strict=True):
            _clients(canvas, axes[1], group, metric, x, shift)
        axes[1].set_ylabel(as_label(f"{client_statistics(groups[0].runs[0], metric)[0]} of clients"))
    _front(canvas, axes[0], means, minimise)
    axes[0].set_ylabel(as_label(f"{metric}, last evaluation"))
    cost_axis(axes[-1], [cost for points in ends for cost in points[:, 0]])
    canvas.legend()


def _points(canvas: Canvas, axes: Axes, group: Group, points: Numbers) -> None:
    """Draw a small mark for each run and a large one for their mean; ``points`` has shape ``(runs, 2)``."""
    style = group.look
    (x, y), repeated = points.mean(axis=0), len(points) > 1
    if repeated:
        x_std, y_std = points.std(axis=0, ddof=1)
        axes.errorbar(x, y, xerr=x_std, yerr=y_std, fmt="none", ecolor=style.colour, elinewidth=1, zorder=2)
        for run, (one_x, one_y) in zip(group.runs, points, strict=True):
            (dot,) = axes.plot(one_x, one_y, marker=style.marker, ms=4, ls="none", color=style.colour, alpha=0.6)
            canvas.tip(dot, f"{run.name}: {one_y:.4g} after {one_x:.4g} MB")
    size, edge = 7 + 2 * style.width, canvas.theme.paper
    (mark,) = axes.plot(x, y, marker=style.marker, ms=size, ls="none", color=style.colour, mec=edge, label=group.label)
    canvas.tip(mark, f"{group.label}: {y:.4g} after {x:.4g} MB" + (f", mean of {len(points)}" if repeated else ""))


def _clients(canvas: Canvas, axes: Axes, group: Group, metric: str, x: float, shift: float) -> None:
    """Draw a bar from low to high clients, as means of repetitions, with a mark in the middle, shifted sideways."""
    found = [[one.last for one in three] for run in group.runs if (three := spread(run, metric)) is not None]
    if not found:
        return
    style, (low, middle, high) = group.look, np.mean(found, axis=0)
    at = offset_copy(axes.transData, canvas.figure, x=shift, units="points")
    axes.update_datalim([(x, low), (x, high)])  # shifted artists are not included automatically
    axes.plot([x, x], [low, high], color=style.colour, lw=2.5, transform=at)
    edge = canvas.theme.paper
    (mark,) = axes.plot(x, middle, marker=style.marker, ms=7, color=style.colour, mec=edge, transform=at)
    canvas.tip(mark, f"{group.label}: clients from {low:.4g} to {high:.4g}, mean or median {middle:.4g}")


def shifts(costs: Numbers) -> list[float]:
    """How far to move each bar sideways, in points, so that bars of the same cost stand side by side.

    Example:
        >>> shifts(np.array([1.0, 2.0, 1.01]))
        [-4.0, 0.0, 4.0]
    """
    known = costs[np.isfinite(costs)]
    far = SAME * np.ptp(known) if len(known) else 0.0
    near = [np.flatnonzero((abs(costs - cost) <= far) | (np.arange(len(costs)) == i)) for i, cost in enumerate(costs)]
    return [GAP * (float(np.flatnonzero(group == i)[0]) - (len(group) - 1) / 2) for i, group in enumerate(near)]


def _front(canvas: Canvas, axes: Axes, means: Numbers, minimise: bool) -> None:
    front = pareto_front(list(means[:, 0]), list(means[:, 1]), minimise)
    if len(front) > 1:
        axes.plot(*means[front].T, color=canvas.theme.ink, lw=1, ls="--", zorder=1)


def curves(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """Draw a metric against rounds and, if all runs counted them, against megabytes."""
    costed = all(megabytes(run) is not None for group in groups for run in group.runs)
    axes = panels(canvas, 2 if costed else 1, sharey=True)
    for group in groups:
        if (found := band(group.each(partial(curve, metric=metric)))) is not None:
            draw_band(axes[0], group, found, found.rounds + 1)
            if costed:
                sent = np.mean([megabytes_at(run, found.rounds) for run in group.runs], axis=0)
                draw_band(axes[1], group, found, sent)
    value_axis(canvas, axes, metric)
    round_axis(axes[0])
    if costed:
        cost_axis(axes[1], [sent.last for group in groups for sent in group.each(megabytes)])
    canvas.legend()


class Panel(NamedTuple):
    """The contents of one panel over rounds."""

    title: str
    of: Callable[[LoggedRun], Curve | None]
    dotted: Callable[[LoggedRun], Curve | None] | None = None  # what was expected
    limits: tuple[float, float | None] | None = None  # of the axis


def over_rounds(
    canvas: Canvas, groups: Sequence[Group], shown: Sequence[Panel], label: str = "", **shared: Any
) -> None:
    """Draw one curve of each group, with its band, in each panel."""
    axes = panels(canvas, len(shown), columns=3, **shared)
    for panel, one in zip(axes, shown, strict=True):
        for group in groups:
            if (found := band(group.each(one.of))) is not None:
                draw_band(panel, group, found, found.rounds + 1)
            if one.dotted is not None and (expected := band(group.each(one.dotted))) is not None:
                panel.plot(expected.rounds + 1, expected.mean, ls=":", color=group.look.colour)
        panel.set_title("\n".join(in_lines(one.title, 60)))
        if one.limits is not None:
            panel.set_ylim(*one.limits)
        round_axis(panel)
    value_axis(canvas, axes, label)
    canvas.legend()


def seconds(canvas: Canvas, groups: Sequence[Group]) -> None:
    """Draw the mean seconds of a round by stage, longest first, with a bar for each group."""
    (axes,) = panels(canvas, 1)
    times = [mean_stage_seconds(group.runs) for group in groups]
    stages = {stage: sum(one.get(stage, 0.0) for one in times) for one in times for stage in one}
    left = np.zeros(len(groups))
    for index, stage in enumerate(sorted(stages, key=lambda name: -stages[name])):
        widths = np.array([one.get(stage, 0.0) for one in times])
        bars = axes.barh(range(len(groups)), widths, left=left, label=stage, **_of_stage(canvas, index))
        for bar, group, width in zip(bars, groups, widths, strict=True):
            canvas.tip(bar, f"{group.label}: {stage} {width:.3g} s")
        left += widths
    labels = ["\n".join(in_lines(group.label, 16 if canvas.narrow else 40)) for group in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round")
    canvas.legend(columns=6, narrow_columns=3)


def _of_stage(canvas: Canvas, index: int) -> dict[str, Any]:
    hatch = HATCHES[index // len(COLOURS) % len(HATCHES)]
    colours = {"color": COLOURS[index % len(COLOURS)], "edgecolor": canvas.theme.paper}
    return {**colours, "hatch": hatch, "linewidth": 0.5, "height": 0.6}


class HeatMap(NamedTuple):
    """The contents of one panel: singular values of a layer of a group's first run, by round."""

    layer: str
    group: str
    by_round: Spectrum

    @property
    def lines(self) -> list[str]:
        """The title, in lines that are no wider than a panel."""
        of_layer = in_lines(self.layer.replace(".", ". "), TITLE)  # broken between parts of the name
        return [*(line.replace(". ", ".") for line in of_layer), *in_lines(self.group, TITLE)]


def heat_maps(canvas: Canvas, shown: Sequence[HeatMap]) -> None:
    """Draw singular values over rounds, with a panel for each layer."""
    axes = panels(canvas, len(shown), columns=3)
    found = [matrix(one.by_round) for one in shown]
    smallest = min(float(np.nanmin(values) / np.nanmax(values)) for _, values in found)
    smallest = min(max(smallest, SMALLEST), LARGEST)  # what is smaller looks the same
    scale = LogNorm(smallest, 1.0)
    for panel, one, (rounds, values) in zip(axes, shown, found, strict=True):
        shares = np.maximum(values / np.nanmax(values), smallest)
        terms = np.arange(values.shape[1] + 1) + 0.5
        panel.pcolormesh(edges(rounds + 1), terms, shares.T, norm=scale, cmap=HEAT, rasterized=True)
        panel.set_title("\n".join(one.lines))
        panel.grid(visible=False)
        panel.invert_yaxis()
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
        round_axis(panel)
        if len(rounds) <= FEW:
            panel.set_xticks(rounds + 1)
    value_axis(canvas, axes, "term, the largest first")
    bar = canvas.figure.colorbar(ScalarMappable(scale, HEAT), ax=axes, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("singular value / the layer's largest")


def matrix(by_round: Spectrum) -> tuple[Numbers, Numbers]:
    """Rounds, shape ``(R,)``, and their singular values, shape ``(R, N)``; NaN where a round has fewer."""
    rounds, terms = sorted(by_round), max(map(len, by_round.values()))
    rounds = rounds[:: -(-len(rounds) * terms // MAX_CELLS)]
    values = np.full((len(rounds), terms), np.nan)
    for row, round_idx in enumerate(rounds):
        values[row, : len(by_round[round_idx])] = by_round[round_idx]
    return np.array(rounds, dtype=np.float64), values


def edges(rounds: Numbers) -> Numbers:
    """Edges halfway between rounds, so that each column is centred on its own round.

    Example:
        >>> edges(np.array([1.0, 11.0, 21.0]))
        array([-4.,  6., 16., 26.])
    """
    if len(rounds) == 1:
        return np.array([rounds[0] - 0.5, rounds[0] + 0.5])
    middles = (rounds[1:] + rounds[:-1]) / 2
    return np.concatenate([[2 * rounds[0] - middles[0]], middles, [2 * rounds[-1] - middles[-1]]])
