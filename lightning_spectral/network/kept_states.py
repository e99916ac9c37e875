"""What a device keeps of its client's turns, in memory or in a folder of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from lightning_spectral.protocol.codec import read_tensors, write_tensors
from lightning_spectral.protocol.records import Download, Tensors, Upload


class KeptStates:
    """The states of one client and model, by run and round: those that a server which resumes a run may ask for.

    A state counts once the server has the upload of its turn. So the one before is kept as well, for a server that
    ended before that.

    Args:
        folder: Where to keep them, so that they outlast the process, for one client and one model; ``None`` for memory.

    Example:
        >>> import torch
        >>> from lightning_spectral.protocol.records import WorkUnit
        >>> states, client = KeptStates(), WorkUnit(0)
        >>> states.keep(Download(client, 1.0, {}), Upload(client, {}, client_state={"head": torch.ones(1)}))
        >>> states.complete(Download(client, 1.0, {}, round_idx=4, last_turn=0)).client_state
        {'head': tensor([1.])}
        >>> states.complete(Download(client, 1.0, {}, round_idx=4, last_turn=3)) is None
        True
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._in_memory: dict[str, Tensors] = {}

    def complete(self, download: Download) -> Download | None:
        """A download with the state of the client's last turn; ``None`` if that is lost."""
        if download.last_turn is None:
            return download
        name = _name(download.seed, download.last_turn)
        if self.folder is None:
            found = self._in_memory.get(name)
        else:
            path = self.folder / name
            found = read_tensors(path.read_bytes()) if path.exists() else None
        if found is None:
            return None
        tensors = download.tensors.values()
        device = next((tensor.device for tensor in tensors), None)
        return replace(download, client_state={n: tensor.to(device or tensor.device) for n, tensor in found.items()})

    def keep(self, download: Download, upload: Upload) -> None:
        """Keep what follows a turn, and no more than that and the state that it began with."""
        new = _name(download.seed, download.round_idx)
        wanted = {new} if download.last_turn is None else {new, _name(download.seed, download.last_turn)}
        if self.folder is None:
            state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in upload.client_state.items()}
            kept = {**self._in_memory, new: state}
            self._in_memory = {name: state for name, state in kept.items() if name in wanted}
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        written = self.folder / f"{new}.part"
        written.write_bytes(write_tensors(upload.client_state))
        os.replace(written, self.folder / new)  # a file is complete or not there
        for path in self.folder.glob(_name("*", "*")):
            if path.name not in wanted:
                path.unlink()


def _name(seed: int | str, round_idx: int | str) -> str:
    return f"seed-{seed}-round-{round_idx}.safetensors"
