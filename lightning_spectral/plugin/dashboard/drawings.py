"""Figures of a dashboard: how the examples are dealt, and the spectra of the layers."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.partition import PartitionReport
from lightning_spectral.plugin.dashboard.records import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LAYERS = 42  # that look different


def can_draw() -> bool:
    """Whether matplotlib, of the ``examples`` extra, is installed."""
    return find_spec("matplotlib") is not None


def partition_drawing(split: PartitionReport) -> Drawing:
    """How many examples each client has, by class if it is known."""
    from lightning_spectral.report.printed import printed

    with printed(None, 8.0, 3.0) as figure:
        split.plot(figure.subplots())
    return Drawing("pictures/partition", _pixels(figure))


def spectra_drawing(layers: Mapping[str, TermDraws]) -> Drawing:
    """The singular values of each sharded layer as shares of its largest one, over the share of its terms."""
    from lightning_spectral.report.printed import draw_line, legend_above, look, printed

    with printed(None, 8.0, 4.0) as figure:
        axes = figure.add_subplot(xlabel="share of the terms", ylabel="share of the largest", ylim=(0.0, 1.05))
        for index, (name, layer) in enumerate(list(layers.items())[:MOST_LAYERS]):
            values = layer.singular_values.detach().double().cpu().numpy()
            heights = values / values.max() if values.max() > 0 else values
            draw_line(axes, np.arange(1, len(values) + 1) / len(values), heights, look(index), name)
        legend_above(figure, columns=3)
    return Drawing("pictures/spectra", _pixels(figure))


def _pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Red, green and blue, shape ``(height, width, 3)``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    pixels: np.ndarray[Any, np.dtype[np.uint8]] = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return pixels
