"""What each figure shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from lightning_spectral.report.dashboard import Spectra
from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.groups import Band, Group, band, pareto_front
from lightning_spectral.report.measures import (
    Curve,
    Numbers,
    client_statistics,
    curve,
    lower_is_better,
    megabytes,
    megabytes_at,
    spread,
    stage_seconds,
)
from lightning_spectral.report.names import EXPECTED_COVERAGE, VISITED
from lightning_spectral.report.runs import Run
from lightning_spectral.report.style import COLOURS, HEAT, look

MEGABYTES = "megabytes sent, both ways, all clients"
ROUNDS = "round"
LOG_FROM = 20  # costs that span more than this factor have a logarithmic axis
MARKS = 12  # markers on a curve


def pareto(canvas: Canvas, groups: Sequence[Group], metric: str, minimise: bool) -> None:
    """The last evaluation of every run against what was sent until then; below it the spread over clients."""
    with_clients = any(clients_at_end(run, metric) for group in groups for run in group.runs)
    axes = _panels(canvas, 2 if with_clients else 1, stacked=True, sharex=True)
    ends = [[(x, y, run) for run in group.runs for x, y in [end(run, metric)]] for group in groups]
    for group, points in zip(groups, ends, strict=True):
        _pareto_points(canvas, axes[0], group, points)
        if with_clients:
            _client_bars(canvas, axes[1], group, metric)
    means = [(float(np.mean([x for x, _, _ in one])), float(np.mean([y for _, y, _ in one]))) for one in ends]
    front = pareto_front([x for x, _ in means], [y for _, y in means], minimise)
    if len(front) > 1:
        axes[0].plot(*zip(*(means[i] for i in front), strict=True), color=canvas.theme.ink, lw=1, ls="--", zorder=1)
    _scale(axes[-1], [x for one in ends for x, _, _ in one])
    axes[0].set_ylabel(f"{metric}, last evaluation")
    axes[-1].set_xlabel(MEGABYTES)
    canvas.legend()


def end(run: Run, metric: str) -> tuple[float, float]:
    """Megabytes sent until the last evaluation, and what it said; megabytes are NaN where none were counted."""
    found = curve(run, metric)
    assert found is not None, "the metric was chosen among those that all runs have"
    sent = megabytes_at(run, found.rounds[-1:])
    return (float(sent[0]) if sent is not None else np.nan), found.last


def clients_at_end(run: Run, metric: str) -> tuple[float, float, float] | None:
    """The low, the middle and the high of a metric over clients, at its last evaluation."""
    found = spread(client_statistics(run, metric)[1])
    return None if found is None else (found[0].last, found[1].last, found[2].last)


def curves(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """A metric against rounds and, if they were counted, against megabytes."""
    costed = all(megabytes(run) is not None for group in groups for run in group.runs)
    axes = _panels(canvas, 2 if costed else 1, sharey=True)
    for group in groups:
        found = band(group.each(lambda run: curve(run, metric)))
        if found is None:
            continue
        _band(axes[0], group, found, found.rounds + 1)
        if costed:
            _band(axes[1], group, found, _mean_megabytes(group, found.rounds))
    axes[0].set(xlabel=ROUNDS, ylabel=metric)
    _integers(axes[0])
    if costed:
        axes[1].set_xlabel(MEGABYTES)
        _scale(axes[1], [sent.last for group in groups for sent in group.each(megabytes)])
    canvas.legend()


def fairness(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """The low, the middle and the high of a metric over clients, against rounds: a panel for each."""
    axes = _panels(canvas, 3, sharey=True)
    for position, title in enumerate(("clients that fare worst", "middle of the clients", "clients that fare best")):
        for group in groups:
            found = band(group.each(_of_clients(metric, position)))
            if found is not None:
                _band(axes[position], group, found, found.rounds + 1)
        axes[position].set(title=title, xlabel=ROUNDS)
        _integers(axes[position])
    axes[0].set_ylabel(metric)
    canvas.legend()


def coverage(canvas: Canvas, groups: Sequence[Group]) -> None:
    """The share of terms that some client held; dashed, what was expected."""
    (axes,) = _panels(canvas, 1)
    for group in groups:
        visited = band(group.each(lambda run: curve(run, VISITED)))
        expected = band(group.each(lambda run: curve(run, EXPECTED_COVERAGE)))
        if visited is not None:
            _band(axes, group, visited, visited.rounds + 1)
        if expected is not None:
            axes.plot(expected.rounds + 1, expected.mean, ls=":", color=look(group.index).colour)
    axes.set(xlabel=ROUNDS, ylabel="share of terms held", ylim=(0, 1.03))
    _integers(axes)
    canvas.legend()


def seconds(canvas: Canvas, groups: Sequence[Group]) -> None:
    """Mean seconds of a round by stage: a bar for each group."""
    (axes,) = _panels(canvas, 1)
    times = [mean_stages(group) for group in groups]
    stages = sorted({stage for one in times for stage in one}, key=lambda stage: -sum(one.get(stage, 0) for one in times))
    left = np.zeros(len(groups))
    for index, stage in enumerate(stages):
        widths = np.array([one.get(stage, 0.0) for one in times])
        bars = axes.barh(range(len(groups)), widths, left=left, label=stage, **_bar_look(canvas, index))
        for bar, group, width in zip(bars, groups, widths, strict=True):
            canvas.tip(bar, f"{group.label}: {stage} {width:.3g} s")
        left += widths
    axes.set_yticks(range(len(groups)), [_wrapped(group.label, canvas) for group in groups])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round, all clients one after another")
    canvas.legend(columns=6)


def mean_stages(group: Group) -> dict[str, float]:
    """Seconds of each stage of a round, mean over the repetitions."""
    found: dict[str, float] = {}
    for run in group.runs:
        for stage, value in stage_seconds(run).items():
            found[stage] = found.get(stage, 0.0) + value / len(group.runs)
    return found


def heat_maps(canvas: Canvas, shown: Sequence[tuple[str, Spectra, str]]) -> None:
    """Singular values over rounds: one panel for each title, spectra and layer."""
    axes = _panels(canvas, len(shown), columns=3)
    image = None
    for panel, (title, by_layer, layer) in zip(axes, shown, strict=True):
        rounds, values = matrix(by_layer, layer)
        floor = np.maximum(values / np.nanmax(values), 1e-4)
        corners = _edges(rounds + 1), np.arange(values.shape[1] + 1) + 0.5
        image = panel.pcolormesh(*corners, np.log10(floor).T, cmap=HEAT, vmin=-4, vmax=0, rasterized=True)
        panel.set(title=title, xlabel=ROUNDS, ylabel="singular value, largest first")
        panel.grid(visible=False)
        panel.invert_yaxis()
        _integers(panel)
        panel.yaxis.set_major_locator(MaxNLocator(integer=True))
    bar = canvas.figure.colorbar(image, ax=axes, location="bottom", shrink=0.6, aspect=40)
    bar.set_label("share of the layer's largest singular value")
    bar.set_ticks(range(-4, 1), labels=["0.0001", "0.001", "0.01", "0.1", "1"])


def matrix(by_layer: Spectra, layer: str) -> tuple[Numbers, Numbers]:
    """Rounds, and one row of singular values for each; NaN where a histogram lost some."""
    found = by_layer[layer]
    rounds = sorted(found)
    values = np.full((len(rounds), max(map(len, found.values()))), np.nan)
    for row, round_idx in enumerate(rounds):
        values[row, : len(found[round_idx])] = found[round_idx]
    return np.array(rounds, dtype=np.float64), values


def _pareto_points(canvas: Canvas, axes: Axes, group: Group, points: Sequence[tuple[float, float, Run]]) -> None:
    colour, marker = look(group.index)
    x, y = np.array([point[:2] for point in points]).T
    spread_of = {"xerr": _std(x), "yerr": _std(y)} if len(points) > 1 else {}
    axes.errorbar(x.mean(), y.mean(), **spread_of, fmt="none", ecolor=colour, elinewidth=1, zorder=2)
    (middle,) = axes.plot(
        x.mean(), y.mean(), marker=marker, ms=10, ls="none", color=colour, mec=canvas.theme.paper, label=group.label
    )
    canvas.tip(middle, f"{group.label}: {y.mean():.4g} after {x.mean():.4g} MB, mean of {len(points)}")
    for one_x, one_y, run in points if len(points) > 1 else []:
        (dot,) = axes.plot(one_x, one_y, marker=marker, ms=4, ls="none", color=colour, alpha=0.6)
        canvas.tip(dot, f"{run.name}: {one_y:.4g} after {one_x:.4g} MB")


def _client_bars(canvas: Canvas, axes: Axes, group: Group, metric: str) -> None:
    """A bar for each run from its low to its high clients, and a mark in the middle."""
    colour, marker = look(group.index)
    for run in group.runs:
        found = clients_at_end(run, metric)
        if found is not None:
            low, centre, high = found
            x, _ = end(run, metric)
            axes.plot([x, x], [low, high], color=colour, lw=2, alpha=0.6)
            (dot,) = axes.plot(x, centre, marker=marker, color=colour, mec=canvas.theme.paper)
            canvas.tip(dot, f"{run.name}: clients from {low:.4g} to {high:.4g}")
    axes.set_ylabel(f"{client_statistics(group.runs[0], metric)[0]} of clients")


def _band(axes: Axes, group: Group, found: Band, x: Numbers) -> None:
    colour, marker = look(group.index)
    every = max(1, len(x) // MARKS)
    axes.plot(x, found.mean, color=colour, marker=marker, markevery=every, label=group.label)
    if found.std.any():
        axes.fill_between(x, found.mean - found.std, found.mean + found.std, color=colour, alpha=0.18, lw=0)


def _mean_megabytes(group: Group, rounds: Numbers) -> Numbers:
    found = [sent for run in group.runs if (sent := megabytes_at(run, rounds)) is not None]
    return np.asarray(np.mean(found, axis=0))


def _of_clients(metric: str, position: int) -> Callable[[Run], Curve | None]:
    def found(run: Run) -> Curve | None:
        three = spread(client_statistics(run, metric)[1])
        return None if three is None else three[position]

    return found


def _bar_look(canvas: Canvas, index: int) -> dict[str, Any]:
    """Colours, and hatches once these begin again."""
    hatch = ("", "///", "...")[index // len(COLOURS) % 3]
    return {"color": COLOURS[index % len(COLOURS)], "hatch": hatch, "edgecolor": canvas.theme.paper, "height": 0.6}


def _panels(canvas: Canvas, number: int, columns: int = 0, stacked: bool = False, **shared: Any) -> list[Axes]:
    """Panels beside each other; below each other on a narrow canvas, or if they are stacked anyway."""
    ncols = 1 if canvas.narrow or stacked else min(columns or number, number)
    nrows = -(-number // ncols)
    grid = canvas.figure.subplots(nrows, ncols, squeeze=False, **shared)
    for unused in grid.flat[number:]:
        unused.remove()
    return list(grid.flat[:number])


def _integers(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins="auto", min_n_ticks=1))


def _scale(axes: Axes, values: Sequence[float]) -> None:
    positive = [value for value in values if value > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        axes.set_xscale("log")


def _std(values: Numbers) -> float:
    return float(values.std(ddof=1))


def _edges(rounds: Numbers) -> Numbers:
    """Limits between rounds, so that rounds that are far apart get wide columns."""
    if len(rounds) == 1:
        return np.array([rounds[0] - 0.5, rounds[0] + 0.5])
    middles = (rounds[1:] + rounds[:-1]) / 2
    return np.concatenate([[2 * rounds[0] - middles[0]], middles, [2 * rounds[-1] - middles[-1]]])


def _wrapped(text: str, canvas: Canvas) -> str:
    return text.replace(", ", ",\n") if canvas.narrow else text
