"""Draws curves against rounds: a panel for each column and group, a line for each row, a band over the seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import matplotlib
from evidence import Store
from grid import Cell, Grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tables import METRICS, Metric, results

from lightning_spectral.report.style import PRINTED, look, settings


def draw(grid: Grid, store: Store, seeds: Sequence[int], folder: Path) -> None:
    """Write the curves of a grid as PNG and SVG, if it has any and runs are done."""
    for name in grid.curves:
        with matplotlib.rc_context(settings(PRINTED)):
            figure = curves(grid, METRICS[name], store, seeds)
            if figure is not None:
                for kind in ("png", "svg"):
                    figure.savefig(folder / f"{grid.name}_{name.replace(' ', '_')}.{kind}", dpi=150)


def curves(grid: Grid, metric: Metric, store: Store, seeds: Sequence[int]) -> Figure | None:
    """All panels of one metric; ``None`` if no run is done."""
    done = [cell for cell in grid.cells if results(store, cell, seeds)]
    columns, groups = (list(dict.fromkeys(names)) for names in ([c.title for c in done], [c.group for c in done]))
    if not done:
        return None
    figure = Figure(figsize=(4.0 * len(columns) + 2.0, 2.8 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), len(columns), squeeze=False, sharex="col", sharey="col")
    rows = list(dict.fromkeys(cell.row for cell in done))
    for cell in done:
        axes = panels[groups.index(cell.group)][columns.index(cell.title)]
        line(axes, cell, rows.index(cell.row), metric, store, seeds)
    for i, group in enumerate(groups):
        for j, column in enumerate(columns):
            panels[i][j].set_title(f"{column}: {group}")
            panels[i][j].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.supxlabel("round")
    figure.supylabel(metric.label)
    handles = {
        label: handle for axes in panels.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def line(axes: Axes, cell: Cell, index: int, metric: Metric, store: Store, seeds: Sequence[int]) -> None:
    """The mean of a cell's runs, and the band from the least to the largest."""
    points: dict[int, list[float]] = defaultdict(list)
    for run in results(store, cell, seeds):
        for at, value in run["curves"].get(metric.name, ()):
            points[at].append(metric.scale * value)
    if not points:
        return
    rounds, values, own = list(points), list(points.values()), look(index)
    axes.plot(rounds, list(map(mean, values)), color=own.colour, marker=own.marker, markevery=0.2, label=cell.row)
    axes.fill_between(rounds, list(map(min, values)), list(map(max, values)), color=own.colour, alpha=0.15, linewidth=0)
