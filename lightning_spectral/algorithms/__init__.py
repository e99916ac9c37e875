"""What a client holds, and how it goes down and comes back."""

from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.algorithms.spectral import SpectralSharding

__all__ = ["Algorithm", "FedAvg", "SpectralSharding"]
