"""The time of a round by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.figures.panels import panels
from lightning_spectral.report.groups import Group
from lightning_spectral.report.measures import mean_stage_seconds
from lightning_spectral.report.style import COLOURS
from lightning_spectral.report.texts import in_lines

NARROW, WIDE = 16, 40  # letters in a line beside a bar
HATCHES = ("", "///", "...")  # for when the colours repeat


def seconds(canvas: Canvas, groups: Sequence[Group]) -> None:
    """Draw the mean seconds of a round by stage, longest first, with a bar for each group."""
    (axes,) = panels(canvas, 1)
    times = [mean_stage_seconds(group.runs) for group in groups]
    stages = {stage: sum(one.get(stage, 0.0) for one in times) for one in times for stage in one}
    left = np.zeros(len(groups))
    for index, stage in enumerate(sorted(stages, key=lambda name: -stages[name])):
        widths = np.array([one.get(stage, 0.0) for one in times])
        bars = axes.barh(range(len(groups)), widths, left=left, label=stage, **_look(canvas, index))
        for bar, group, width in zip(bars, groups, widths, strict=True):
            canvas.tip(bar, f"{group.label}: {stage} {width:.3g} s")
        left += widths
    labels = ["\n".join(in_lines(group.label, NARROW if canvas.narrow else WIDE)) for group in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds per round")
    canvas.legend(columns=6, narrow_columns=3)


def _look(canvas: Canvas, index: int) -> dict[str, Any]:
    hatch = HATCHES[index // len(COLOURS) % len(HATCHES)]
    colours = {"color": COLOURS[index % len(COLOURS)], "edgecolor": canvas.theme.paper}
    return {**colours, "hatch": hatch, "linewidth": 0.5, "height": 0.6}
