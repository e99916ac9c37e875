"""Frozen tensors stay on a device, so that they travel to it once."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lightning_spectral.protocol.records import Download


class KeptTensors:
    """The frozen tensors of earlier downloads, by name, each with the digest that it came with.

    Within the server's process downloads are complete, and these are the server's own tensors.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[str, Tensor]] = {}

    def complete(self, download: Download) -> Download:
        """Keep what came, and add what did not because the client has it.

        Raises:
            LookupError: If it is not here.
        """
        if not download.frozen:
            return download
        arrived = {name: download.tensors[name] for name in download.frozen if name in download.tensors}
        self._tensors.update({name: (download.frozen[name], tensor) for name, tensor in arrived.items()})
        absent = download.held - arrived.keys()
        if missing := [n for n in sorted(absent) if self._tensors.get(n, ("",))[0] != download.frozen[n]]:
            raise LookupError(
                f"{', '.join(missing)} came with an earlier download of this client, and this device has not kept it, "
                "or has another value. An executor that moves clients between devices sends all of it each time: "
                "`dataclasses.replace(download, held=frozenset())`."
            )
        kept = {name: self._tensors[name][1] for name in absent}
        return replace(download, tensors={**download.tensors, **kept})
