"""Clients that do not deliver: who they are, in a simulation, and what a run does about them."""

from lightning_spectral.faults.clock import DeviceProfile, Turn, VirtualClock
from lightning_spectral.faults.dropout import ClientDropout
from lightning_spectral.faults.fates import Conditions, Fate, Fates
from lightning_spectral.faults.policy import Faults, LeaveOut, Raise

__all__ = [
    "ClientDropout",
    "Conditions",
    "DeviceProfile",
    "Fate",
    "Fates",
    "Faults",
    "LeaveOut",
    "Raise",
    "Turn",
    "VirtualClock",
]
