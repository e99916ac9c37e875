"""Draws the results of runs against rounds or terms, with a line for each row and a band over the seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import wrap
from typing import Any

from evidence import Evidence, Store
from grid import Cell, Grid
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tables import METRICS, results

from lightning_spectral.report.printed import draw_line, draw_spread, look, printed

Points = Sequence[tuple[float, float]]
Panels = Mapping[tuple[str, str], Mapping[str, Sequence[Points]]]  # (group, column) -> line -> runs of all seeds
MAX_LAYERS = 4  # whose holders are drawn
TITLE = 34  # letters that fit above a panel


def draw(grid: Grid, store: Store, seeds: Sequence[int], folder: Path) -> None:
    """Write the figures of a grid as PNG, from the runs that are done."""
    for name in grid.figures:
        panels = by_term(grid, store, seeds) if name == "holders" else by_round(grid, name, store, seeds)
        labels = ("term, the largest first", "clients that hold it, mean over rounds")
        if name != "holders":
            labels = ("round", METRICS[name].label)
        if panels:
            groups, columns = (list(dict.fromkeys(names)) for names in zip(*panels, strict=True))
            path = folder / f"{grid.name}_{name.replace(' ', '_')}.png"
            with printed(path, 3.0 * len(columns) + 2.5, 2.6 * len(groups)) as figure:
                fill(figure, panels, groups, columns, *labels)


def drawable(run: Evidence) -> Evidence:
    """Return a run with only the curves that a figure can show; its other metrics still have means and last values."""
    shown = tuple(metric.name for metric in METRICS.values())
    return {**run, "curves": {name: points for name, points in run["curves"].items() if name.startswith(shown)}}


def by_round(grid: Grid, name: str, store: Store, seeds: Sequence[int]) -> Panels:
    """Return the values of a metric against rounds, in a panel for each group and column."""
    metric = METRICS[name]

    def lines(cell: Cell, run: Evidence) -> Mapping[str, Points]:
        """Return one line named after the row; for a metric of several layers, one named after each layer."""
        if metric.name in run["curves"]:
            return {cell.row: scaled(run["curves"][metric.name], metric.scale)}
        layers = [logged for logged in run["curves"] if metric.of_layers and logged.startswith(metric.name)]
        return {n.removeprefix(metric.name): scaled(run["curves"][n], metric.scale) for n in layers}

    return collected(grid, store, seeds, lambda cell, run: {(cell.group, cell.title): lines(cell, run)})


def scaled(points: Points, scale: float) -> Points:
    """Return the points in another unit."""
    return [(at, scale * value) for at, value in points]


def by_term(grid: Grid, store: Store, seeds: Sequence[int]) -> Panels:
    """Return mean numbers of clients against terms, in a panel for each group and layer."""

    def panels(cell: Cell, run: Evidence) -> Panels:
        layers = list(run["holders"])
        chosen = layers[:: max(1, len(layers) // MAX_LAYERS)][:MAX_LAYERS]
        return {
            (cell.group, layer.removeprefix("model.")): {cell.row: list(enumerate(run["holders"][layer], start=1))}
            for layer in chosen
        }

    return collected(grid, store, seeds, panels)


def collected(
    grid: Grid,
    store: Store,
    seeds: Sequence[int],
    panels: Callable[[Cell, Evidence], Mapping[Any, Mapping[str, Points]]],
) -> Panels:
    """Return the lines of all finished runs, by panel."""
    found: dict[Any, dict[str, list[Points]]] = defaultdict(lambda: defaultdict(list))
    for cell in grid.cells:
        for run in results(store, cell, seeds):
            for panel, lines in panels(cell, run).items():
                for label, points in lines.items():
                    found[panel][label].append(points)
    return found


def fill(figure: Figure, panels: Panels, groups: Sequence[str], columns: Sequence[str], x: str, y: str) -> None:
    """Draw a row of panels for each group; the panels of a column have one scale."""
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    grid = figure.subplots(len(groups), len(columns), squeeze=False, sharey="col")
    for (group, column), lines in panels.items():
        axes = grid[groups.index(group)][columns.index(column)]
        axes.set_title("\n".join([*filter(None, [column]), *wrap(group, TITLE)]))
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        for label, runs in lines.items():
            line(axes, label, labels.index(label), runs)
    figure.supxlabel(x)
    figure.supylabel(y)
    handles = {t: h for axes in grid.flat for h, t in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")


def line(axes: Axes, label: str, index: int, runs: Sequence[Points]) -> None:
    """Draw the mean over the seeds, and a band from the smallest to the largest value."""
    values: dict[float, list[float]] = defaultdict(list)
    for points in runs:
        for at, value in points:
            values[at].append(value)
    own, at, of_seeds = look(index), list(values), list(values.values())
    draw_line(axes, at, list(map(mean, of_seeds)), own, label)
    draw_spread(axes, at, list(map(min, of_seeds)), list(map(max, of_seeds)), own)
