"""Frozen tensors that a device keeps from message to message, as bytes."""

from __future__ import annotations

from collections.abc import MutableMapping

from lightning_spectral.client.device import Device
from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.codec import decode_plain, encode_plain

KIND = "KeptTensors"


def write_kept(device: Device, memory: MutableMapping[str, bytes], model: str) -> None:
    """Write what a device keeps, unless it is what was written last."""
    digests = encode_plain({name: digest for name, (digest, _) in device.kept.tensors.items()}, KIND)
    if memory.get(f"kept digests {model}") != digests:
        memory[f"kept {model}"] = encode_plain(dict(device.kept.tensors), KIND)
        memory[f"kept digests {model}"] = digests


def read_kept(device: Device, memory: MutableMapping[str, bytes], model: str) -> None:
    """Let a device that has just been made keep what an earlier process wrote; what is damaged counts as lost."""
    if device.kept.tensors or f"kept {model}" not in memory:
        return
    try:
        kept = decode_plain(memory[f"kept {model}"], KIND)
    except RecordError:
        del memory[f"kept {model}"]
        return
    where = device.settings.placement.device
    device.kept.tensors.update({name: (digest, tensor.to(where)) for name, (digest, tensor) in kept.items()})
