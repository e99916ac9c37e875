"""Sub-models by width: clients train some channels of every layer."""

from lightning_spectral.algorithms.width.algorithm import WidthSharding

__all__ = ["WidthSharding"]
