"""Spectral sharding: clients train sampled singular terms of every affine layer."""

from lightning_spectral.algorithms.spectral.aggregation import MatrixMeans, TermAggregation, TermMeans
from lightning_spectral.algorithms.spectral.algorithm import SpectralSharding, SpectralSide
from lightning_spectral.algorithms.spectral.start import SpectralStart, spectral_start

__all__ = [
    "MatrixMeans",
    "SpectralSharding",
    "SpectralSide",
    "SpectralStart",
    "TermAggregation",
    "TermMeans",
    "spectral_start",
]
