"""Panels, axes and bands shared by several figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes

from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.groups import Band, Group
from lightning_spectral.report.measures import Numbers
from lightning_spectral.report.printed import draw_line, draw_spread, log_axis
from lightning_spectral.report.texts import as_label

MEGABYTES = "megabytes sent, both ways, all clients"
LOG_FROM = 20  # costs that span more than this factor get a logarithmic axis


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
    axes.set_xlabel(MEGABYTES)
    positive = [cost for cost in costs if cost > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        log_axis(axes)
