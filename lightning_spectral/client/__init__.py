"""The device half of a run: everything a device needs to train, without Lightning and without the server."""

from lightning_spectral.client.local_hooks import (
    CalibratedLogits,
    FixedBatchNorm,
    GradientClip,
    LocalHook,
    LogitsHook,
    MaskedLogits,
    ProximalTerm,
)

__all__ = [
    "CalibratedLogits",
    "FixedBatchNorm",
    "GradientClip",
    "LocalHook",
    "LogitsHook",
    "MaskedLogits",
    "ProximalTerm",
]
