"""What clients hold, what travels, and how it is averaged."""

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.fed_avg import DenseRound, DenseSide, FedAvg
from lightning_spectral.algorithms.scaffold import Scaffold
from lightning_spectral.algorithms.spectral import SpectralSharding
from lightning_spectral.algorithms.spectral_side import SpectralSide
from lightning_spectral.algorithms.stale_updates import StaleUpdates
from lightning_spectral.algorithms.zampling import Zampling

__all__ = [
    "Algorithm",
    "DenseRound",
    "DenseSide",
    "FedAvg",
    "Scaffold",
    "SpectralSharding",
    "SpectralSide",
    "StaleUpdates",
    "Zampling",
]
