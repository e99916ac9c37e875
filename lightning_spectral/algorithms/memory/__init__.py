"""Algorithms whose server remembers something of each client: stale updates, and SCAFFOLD's control variates."""

from lightning_spectral.algorithms.memory.kept import ClientSum
from lightning_spectral.algorithms.memory.scaffold import Scaffold
from lightning_spectral.algorithms.memory.stale_updates import StaleUpdates

__all__ = ["ClientSum", "Scaffold", "StaleUpdates"]
