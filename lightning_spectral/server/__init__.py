"""The server half of a run: rounds, clients' turns, averages and the server's step."""

from lightning_spectral.server.fault_policy import Faults, LeaveOut, MaxUpdateNorm, Raise, UsualUpdateNorm
from lightning_spectral.server.optimizers import BoundedMomentum, FedAdagrad, FedAdam, FedAvgM, FedYogi
from lightning_spectral.server.privacy import ClientPrivacy
from lightning_spectral.server.secure_sums import SecureSums

__all__ = [
    "BoundedMomentum",
    "ClientPrivacy",
    "Faults",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedYogi",
    "LeaveOut",
    "MaxUpdateNorm",
    "Raise",
    "SecureSums",
    "UsualUpdateNorm",
]
