"""Curves of several seeds, as the studies draw them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from lightning_spectral.report.printed import Look, draw_line, draw_spread


def draw_seeds(axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], look: Look, label: str) -> None:
    """Draw the mean of some repetitions, and a band from the lowest to the highest; nothing without repetitions."""
    if runs:
        values = np.asarray(runs)
        draw_line(axes, x, values.mean(axis=0), look, label)
        if len(runs) > 1:
            draw_spread(axes, x, values.min(axis=0), values.max(axis=0), look)
