"""FIARSE: a client's sub-model consists of the server's largest weights."""

from lightning_spectral.algorithms.fiarse.config import FIARSE

__all__ = ["FIARSE"]
