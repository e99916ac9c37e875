"""The device half of a run: everything a device needs to train, without Lightning and without the server."""

from lightning_spectral.client.device import ClientSide, Device, StepActions
from lightning_spectral.client.local_hooks import GradientClip, LocalHook, MaskedLogits, ProximalTerm

__all__ = ["ClientSide", "Device", "GradientClip", "LocalHook", "MaskedLogits", "ProximalTerm", "StepActions"]
