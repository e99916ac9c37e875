"""Who runs the device half of a round: the contract, and one client after another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from lightning_spectral.client.device import Device
from lightning_spectral.protocol.records import Download, Upload


class Executor(ABC):
    """Brings downloads to devices and uploads back. It knows nothing of algorithms."""

    @abstractmethod
    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield one upload for each download, in any order.

        The server reads an upload before it asks for the next one, or owns a copy: the tensors of an upload may be the
        memory in which the next client trains. A device that fails says so in `Upload.failure`.
        """

    def begin_round(self) -> None:
        """Called when a round opens. Here: nothing to prepare."""
        return None

    def end_round(self) -> None:
        """Called when all clients of a round have trained, or when it fails. Here: nothing to clear up."""
        return None


class SequentialExecutor(Executor):
    """Trains one client after another on a device in this process.

    From a round's beginning to its end the process's global generators are the clients'.

    Args:
        device: Where all of them train.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    def begin_round(self) -> None:
        """Remember the state of the global generators."""
        self.device.generators.save()

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads in the order of the downloads."""
        return map(self.device.run, downloads)

    def end_round(self) -> None:
        """Restore the global generators, and make room for the server's step."""
        self.device.generators.restore()
        self.device.release()
