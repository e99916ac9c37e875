"""The mathematics of Zampling: weights as sparse random combinations of bits."""

from lightning_spectral.functional.zampling.links import Clip, Link, Sigmoid

__all__ = ["Clip", "Link", "Sigmoid"]
