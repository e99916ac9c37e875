"""Exact sums over clients, whose bits depend neither on the order of the clients nor on their processes."""

from lightning_spectral.sums.mean_bits import MeanBits
from lightning_spectral.sums.mean_change import MeanChange
from lightning_spectral.sums.running_mean import RunningMean, add_up
from lightning_spectral.sums.weights import Weights

__all__ = ["MeanBits", "MeanChange", "RunningMean", "Weights", "add_up"]
