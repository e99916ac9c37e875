"""Exact sums over clients, whose bits depend neither on the clients' order nor on their processes."""

from lightning_spectral.sums.exact_mean import MeanChange, RunningMean, SummandError, add_up, check_summable

__all__ = ["MeanChange", "RunningMean", "SummandError", "add_up", "check_summable"]
