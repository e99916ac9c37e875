"""Frozen tensors, which are sent once: which they are, and what a device keeps of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lightning_spectral.protocol.buffer_rules import averaged_parameters
from lightning_spectral.protocol.records import Download


@dataclass(eq=False)
class KeptTensors:
    """The frozen tensors of earlier downloads, by name, each with the digest it was sent with.

    In the server's own process, downloads are complete, and the tensors kept here are the server's own.
    """

    tensors: dict[str, tuple[str, Tensor]] = field(default_factory=dict, init=False, repr=False)

    def missing(self, download: Download) -> tuple[str, ...]:
        """Names of the tensors that were not sent, and which are not here or have another value."""
        absent = sorted(download.held - download.tensors.keys())
        return tuple(name for name in absent if self.tensors.get(name, ("",))[0] != download.frozen.get(name))

    def complete(self, download: Download) -> Download:
        """Keep the frozen tensors that were sent, and add those that were not, of which none may be `missing`."""
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self.tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        kept = {name: self.tensors[name][1] for name in download.held - arrived.keys()}
        return replace(download, tensors={**download.tensors, **kept})


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a module that do not require a gradient and are not averaged, by name.

    Example:
        >>> sorted(frozen_parameters(nn.Linear(2, 2).requires_grad_(False)))
        ['bias', 'weight']
    """
    averaged = averaged_parameters(module)
    named = module.named_parameters()
    return {name: p.detach() for name, p in named if not p.requires_grad and name not in averaged}


def digest(tensor: Tensor) -> str:
    """A digest of a tensor's type, shape and values; equal digests mean equal bits.

    Example:
        >>> digest(torch.zeros(2)) == digest(torch.zeros(2)), digest(torch.zeros(2)) == digest(-torch.zeros(2))
        (True, False)
    """
    hashed = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # a contiguous tensor may have any stride along dimensions of length 0 or 1, which torch cannot view as bytes
    hashed.update(values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
