"""Zampling: a short vector of probabilities goes down, and one bit for each comes back."""

from lightning_spectral.algorithms.zampling.config import Zampling

__all__ = ["Zampling"]
