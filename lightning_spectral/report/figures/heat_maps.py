"""Singular values of layers over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator

from lightning_spectral.report.dashboard import Spectrum
from lightning_spectral.report.drawing import Canvas
from lightning_spectral.report.figures.panels import panels, value_axis
from lightning_spectral.report.measures import Numbers
from lightning_spectral.report.printed import round_axis
from lightning_spectral.report.style import HEAT
from lightning_spectral.report.texts import in_lines

TITLE = 36  # letters that fit above a panel
FEW = 6  # rounds that are each marked on the axis
SMALLEST = 1e-4  # as a share of the largest singular value of the layer in all rounds; smaller ones look the same
MAX_CELLS = 4_000_000  # of a panel, which has far fewer pixels; with more, rounds are skipped
LARGEST = 0.1  # at which the scale may begin


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
    smallest = min(max(smallest, SMALLEST), LARGEST)
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
