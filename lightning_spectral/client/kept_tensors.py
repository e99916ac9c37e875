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
        self._tensors: dict[str, tuple[str, Tensor]] = {}

    def complete(self, download: Download) -> Download:
        """Keep the frozen tensors that were sent, and add those that were not because the client already has them.

        Raises:
            LookupError: If one of these is missing here, or has another value.
        """
        if not download.frozen:
            return download
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self._tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        absent = download.held - arrived.keys()
        if missing := [n for n in sorted(absent) if self._tensors.get(n, ("",))[0] != download.frozen[n]]:
            raise LookupError(
                f"{', '.join(missing)} came with an earlier download of this client, but this device has not kept it "
                "or has another value. An executor that moves clients between devices must send everything each time: "
                "`dataclasses.replace(download, held=frozenset())`."
            )
        kept = {name: self._tensors[name][1] for name in absent}
        return replace(download, tensors={**download.tensors, **kept})
