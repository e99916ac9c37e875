"""All that a device needs to train what it was sent, without Lightning and without the server."""

from lightning_spectral.client.device import Device
from lightning_spectral.client.side import ClientSide, StepActions

__all__ = ["ClientSide", "Device", "StepActions"]
