"""Exact sums and extremes over clients, whose bits depend neither on the clients' order nor on their processes."""

from lightning_spectral.sums.exact_sum import Weights
from lightning_spectral.sums.extremes import Extremes
from lightning_spectral.sums.mean_change import MeanChange
from lightning_spectral.sums.running_mean import MeanBits, RunningMean, add_up

__all__ = ["Extremes", "MeanBits", "MeanChange", "RunningMean", "Weights", "add_up"]
