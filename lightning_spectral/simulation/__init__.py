"""Who of a round's clients will report back, and when: simulated, and known before anybody trains."""

from lightning_spectral.simulation.clock import DeviceProfile, Turn, VirtualClock
from lightning_spectral.simulation.dropout import ClientDropout
from lightning_spectral.simulation.outcomes import Conditions, Fate, Fates

__all__ = ["ClientDropout", "Conditions", "DeviceProfile", "Fate", "Fates", "Turn", "VirtualClock"]
