"""An executor over a bad line: the server must get the same bits as from one that answers in order."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from lightning_spectral.client.device import Device
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import SequentialExecutor


class Unreliable(SequentialExecutor):
    """Answers in blocks of three and in random order; every fourth upload is lost, and its client trains again.

    Attributes:
        num_calls: How often it was called.
        num_lost: How many uploads were lost.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        self.num_calls = self.num_lost = 0
        self._chance = random.Random(0)
        self._num_trained = 0

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        self.num_calls += 1
        remaining = iter(downloads)
        while block := list(islice(remaining, 3)):
            while block:
                self._chance.shuffle(block)
                upload = self.device.run(block[-1])
                self._num_trained += 1
                if self._num_trained % 4 == 0:
                    self.num_lost += 1
                else:
                    block.pop()
                    # a copy, because clients may train again before the server has read it
                    yield replace(upload, tensors={name: tensor.clone() for name, tensor in upload.tensors.items()})
