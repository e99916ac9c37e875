"""What is sent between server and devices."""

from lightning_spectral.protocol.per_client import Schedule

__all__ = ["Schedule"]
