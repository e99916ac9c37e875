"""An evaluation metric against its cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import offset_copy

from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.ends import group_end
from lightning_spectral.report.figures.panels import cost_axis, panels
from lightning_spectral.report.groups import Group, pareto_front
from lightning_spectral.report.measures import Numbers, client_statistics, clients_at_end
from lightning_spectral.report.texts import as_label

GAP = 8.0  # points between the bars of groups that sent the same
SAME = 0.02  # costs are the same if they differ by less than this share of all that is shown


def pareto(canvas: Canvas, groups: Sequence[Group], metric: str, minimise: bool) -> None:
    """Draw every run's last evaluation against what was sent until then; below it, the spread over clients."""
    with_clients = any(clients_at_end(run, metric) for group in groups for run in group.runs)
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
    found = [three for run in group.runs if (three := clients_at_end(run, metric)) is not None]
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
