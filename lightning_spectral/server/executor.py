"""The interface of executors, which run the device half of a round, and one that trains one client at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lightning_spectral.client.device import Device
from lightning_spectral.protocol.records import Download, ExclusionReason, Handshake, Upload


class Executor(ABC):
    """Sends downloads to devices and returns their uploads, independently of the algorithm.

    Attributes:
        exclusion_reasons: Why it may leave clients out of a round by itself; ``Faults`` says what becomes of them.
    """

    exclusion_reasons: tuple[ExclusionReason, ...] = ()

    @abstractmethod
    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield one upload for each download, in any order, as they arrive.

        Called once a round, with the downloads of all clients that this process trains. They are drawn as they are
        taken: an executor that takes the next one when a client is done holds one at a time.

        The server reads or copies an upload before it asks for the next one, because the next client may train in the
        memory of its tensors. A device that fails reports it in `Upload.failure`.
        """

    def agree(self, questions: Sequence[Handshake]) -> Iterator[Handshake | Upload]:
        """Yield one answer for each question of secure sums, in any order; an `Upload` says why there is none.

        By default it carries none, and trains no clients whose sums are secure.
        """
        raise NotImplementedError(
            f"{type(self).__name__} carries no messages of secure sums; define its method `agree`, which asks each "
            "device `Device.parties`."
        )

    def begin_round(self) -> None:
        """Prepare for a round; called when it opens. By default it does nothing."""
        return None

    def end_round(self) -> None:
        """Clean up after a round; called when all its clients have trained, or when it fails.

        It may be called twice. By default it does nothing.
        """
        return None


@dataclass(eq=False)
class SequentialExecutor(Executor):
    """Trains one client after another on a device in this process.

    From the beginning of a round to its end, the clients' seeds govern the global generators of the process.

    Args:
        device: The device on which all clients train.
    """

    device: Device

    def agree(self, questions: Sequence[Handshake]) -> Iterator[Handshake | Upload]:
        return map(self.device.parties.answer, questions)

    def begin_round(self) -> None:
        self.device.generators.save()

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        return map(self.device.run, downloads)

    def end_round(self) -> None:
        self.device.generators.restore()
        self.device.forms.give_back()  # if not even Ctrl-C in `run` let it
