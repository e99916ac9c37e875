"""Simulated dropout and device speed: which clients of a round report back, and when."""

from lightning_spectral.simulation.clock import DeviceProfile, SimulatedTask, VirtualClock
from lightning_spectral.simulation.outcomes import (
    ClientDropout,
    Conditions,
    SimulatedOutcome,
    SimulatedRound,
    Simulation,
)

__all__ = [
    "ClientDropout",
    "Conditions",
    "DeviceProfile",
    "SimulatedOutcome",
    "SimulatedRound",
    "SimulatedTask",
    "Simulation",
    "VirtualClock",
]
