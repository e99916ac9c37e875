"""Metrics over the rounds of a run, and the time of a round by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.figures.panels import cost_axis, draw_band, panels, value_axis
from lightning_spectral.report.groups import Group, band
from lightning_spectral.report.measures import (
    Curve,
    Numbers,
    client_statistics,
    curve,
    mean_stage_seconds,
    megabytes,
    megabytes_at,
    spread,
)
from lightning_spectral.report.names import BITS, EXPECTED_COVERAGE, MOVED, SAMPLING_GAP, VISITED
from lightning_spectral.report.printed import round_axis
from lightning_spectral.report.runs import LoggedRun
from lightning_spectral.report.style import COLOURS
from lightning_spectral.report.texts import in_lines

TITLE = 60  # letters above a panel
NARROW, WIDE = 16, 40  # letters in a line beside a bar
HATCHES = ("", "///", "...")  # for when the colours repeat


def curves(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """Draw a metric against rounds and, if all runs counted them, against megabytes."""
    costed = all(megabytes(run) is not None for group in groups for run in group.runs)
    axes = panels(canvas, 2 if costed else 1, sharey=True)
    for group in groups:
        found = band(group.each(lambda run: curve(run, metric)))
        if found is not None:
            draw_band(axes[0], group, found, found.rounds + 1)
            if costed:
                draw_band(axes[1], group, found, _mean_megabytes(group, found.rounds))
    value_axis(canvas, axes, metric)
    round_axis(axes[0])
    if costed:
        cost_axis(axes[1], [sent.last for group in groups for sent in group.each(megabytes)])
    canvas.legend()


def fairness(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """Draw the low, middle and high values of a metric over clients against rounds, in a panel each."""
    axes = panels(canvas, 3, sharey=True)
    for position, title in enumerate(("low end of the clients", "middle of the clients", "high end of the clients")):
        for group in groups:
            found = band(group.each(_of_clients(metric, position)))
            if found is not None:
                draw_band(axes[position], group, found, found.rounds + 1)
        axes[position].set_title(title)
        round_axis(axes[position])
    value_axis(canvas, axes, metric)
    canvas.legend()


def coverage(canvas: Canvas, groups: Sequence[Group]) -> None:
    """Draw the share of terms held by some client; dotted, the expected share."""
    (axes,) = panels(canvas, 1)
    for group in groups:
        visited = band(group.each(_named(VISITED)))
        expected = band(group.each(_named(EXPECTED_COVERAGE)))
        if visited is not None:
            draw_band(axes, group, visited, visited.rounds + 1)
        if expected is not None:
            axes.plot(expected.rounds + 1, expected.mean, ls=":", color=group.look.colour)
    axes.set(ylabel="share of terms held", ylim=(0, 1.03))
    round_axis(axes)
    canvas.legend()


def bits(canvas: Canvas, groups: Sequence[Group], metric: str) -> None:
    """Draw how far Zampling's bits are decided, and the cost of sampling: a panel for each figure that a run has."""
    titles = {**BITS, metric + SAMPLING_GAP: f"{metric}: expected minus sampled"}
    found = {
        name: [(group, one) for group in groups if (one := band(group.each(_named(name)))) is not None]
        for name in titles
    }
    shown = {name: bands for name, bands in found.items() if bands}
    axes = panels(canvas, len(shown), columns=3)
    for panel, (name, bands) in zip(axes, shown.items(), strict=True):
        for group, one in bands:
            draw_band(panel, group, one, one.rounds + 1)
        panel.set_title("\n".join(in_lines(titles[name], TITLE)))
        if name in BITS:
            panel.set_ylim(0, None if name == MOVED else 1.03)  # a client moves probabilities by a few hundredths
        round_axis(panel)
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
    labels = ["\n".join(in_lines(group.label, NARROW if canvas.narrow else WIDE)) for group in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round")
    canvas.legend(columns=6, narrow_columns=3)


def _of_stage(canvas: Canvas, index: int) -> dict[str, Any]:
    hatch = HATCHES[index // len(COLOURS) % len(HATCHES)]
    colours = {"color": COLOURS[index % len(COLOURS)], "edgecolor": canvas.theme.paper}
    return {**colours, "hatch": hatch, "linewidth": 0.5, "height": 0.6}


def _named(name: str) -> Callable[[LoggedRun], Curve | None]:
    return lambda run: curve(run, name, of_all=False)


def _mean_megabytes(group: Group, rounds: Numbers) -> Numbers:
    found = [sent for run in group.runs if (sent := megabytes_at(run, rounds)) is not None]
    return np.asarray(np.mean(found, axis=0))


def _of_clients(metric: str, position: int) -> Callable[[LoggedRun], Curve | None]:
    def found(run: LoggedRun) -> Curve | None:
        three = spread(client_statistics(run, metric)[1])
        return None if three is None else three[position]

    return found
