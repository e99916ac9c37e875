"""Keeps frozen tensors on a device, so that each is sent to it only once."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_spectral.protocol.records import Download


class KeptTensors:
    """The frozen tensors of earlier downloads, by name, each with the digest it was sent with.

    In the server's own process, downloads are complete, and the tensors kept here are the server's own.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, Tensor]] = {}

    def missing(self, download: Download) -> tuple[str, ...]:
        """Names of the tensors that were not sent, and which are not here or have another value."""
        absent = sorted(download.held - download.tensors.keys())
        return tuple(name for name in absent if self.tensors.get(name, ("",))[0] != download.frozen.get(name))

    def complete(self, download: Download) -> Download:
        """Keep the frozen tensors that were sent, and add those that were not, of which none may be `missing`."""
        if not download.frozen:
            return download
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self.tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        kept = {name: self.tensors[name][1] for name in download.held - arrived.keys()}
        return replace(download, tensors={**download.tensors, **kept})
