"""The clients of a trial: what they train on, and a device that reaches the server over the codec alone."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import TensorDataset

from lightning_spectral.algorithms import Algorithm
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import Device
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor, SequentialExecutor

SEED = 3


class SomeSteps(ClientData):
    """A client that sees one batch several times, so that clients differ whatever the batch is."""

    def __init__(self, batch: Any, num_steps: int) -> None:
        super().__init__(BatchSource(TensorDataset()), torch.arange(num_steps), 1, SEED, ())
        self.batch, self.steps = batch, num_steps

    def epoch(self, local_epoch: int) -> Iterator[tuple[Any, int]]:
        """Yield copies of the batch, since steps may write to it."""
        return ((copy.deepcopy(self.batch), 1) for _ in range(self.steps))


@dataclass(frozen=True)
class Case:
    """What every trial has in common.

    Attributes:
        algorithm: The algorithm.
        module: The user's module; only copies of it are trained.
        batch: What its ``training_step`` receives.
        lr: Learning rate of the clients' SGD.
        local_hooks: What acts in every local step.
        device: Where the server is, and where clients train.
    """

    algorithm: Algorithm
    module: nn.Module
    batch: Any
    lr: float
    local_hooks: tuple[LocalHook, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def data(self, download: Download) -> ClientData:
        """The data of a download's client: from one to three steps."""
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), self.batch)
        return SomeSteps(batch, 1 + download.unit.client_id % 3)


class Losing(SequentialExecutor):
    """A device that loses some clients after their downloads, by id."""

    def __init__(self, device: Device, lost: Collection[int]) -> None:
        super().__init__(device)
        self.lost = lost

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Train one client after another."""
        for download in downloads:
            is_lost = download.unit.client_id in self.lost
            yield Upload(download.unit, {}, left_out="late") if is_lost else self.device.run(download)


class OverTheCodec(Executor):
    """A device that shares nothing with the server: its half was pickled, and records travel as bytes.

    Attributes:
        bytes: For each client of the round, by id: how many bytes of tensors arrived at the device, and came back.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.bytes: dict[int, tuple[int, int]] = {}

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Train one client after another."""
        from lightning_spectral.protocol.codec import decode, encode  # which needs packages of an extra

        for download in downloads:
            arrived = decode(*encode(download), Download)
            upload = decode(*encode(self.device.run(arrived)), Upload)
            self.bytes[upload.unit.client_id] = arrived.num_bytes, upload.num_bytes
            yield upload
