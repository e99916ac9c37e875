"""The device half of a run: everything a device needs to train, without Lightning and without the server."""

from lightning_spectral.client.device import Device
from lightning_spectral.client.local_hooks import GradientClip, LocalHook, ProximalTerm
from lightning_spectral.client.masked_logits import MaskedLogits
from lightning_spectral.client.side import ClientSide, StepActions

__all__ = ["ClientSide", "Device", "GradientClip", "LocalHook", "MaskedLogits", "ProximalTerm", "StepActions"]
