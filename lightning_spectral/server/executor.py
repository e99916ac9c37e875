"""Who runs the device half of a round: the contract, and one client after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from lightning_spectral.client.device import Device
from lightning_spectral.protocol.records import Download, Upload


class Executor(Protocol):
    """Brings downloads to devices and uploads back. It knows nothing of algorithms."""

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield one upload for each download, in any order.

        The server reads an upload before it asks for the next one, or owns a copy: the tensors of an upload may be the
        memory in which the next client trains. A device that fails says so in `Upload.failure`.
        """


class SequentialExecutor:
    """Trains one client after another on a device in this process.

    Args:
        device: Where all of them train.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads in the order of the downloads."""
        return map(self.device.run, downloads)
