"""The server half of a run: rounds, clients' turns, averages and the server's step."""

from lightning_spectral.filters.robust_rules import GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from lightning_spectral.server.fault_policy import Faults, LeaveOut, Raise
from lightning_spectral.server.optimizers import BoundedMomentum, FedAdagrad, FedAdam, FedAvgM, FedYogi

__all__ = [
    "BoundedMomentum",
    "Faults",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "GeometricMedian",
    "Krum",
    "LeaveOut",
    "Median",
    "MultiKrum",
    "Raise",
    "TrimmedMean",
]
