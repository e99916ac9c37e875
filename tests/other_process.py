"""An executor whose device lives in another process: it gets its instructions once, then downloads alone, as bytes."""

import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from forks import started
from torch.optim import Optimizer
from torch.utils.data import TensorDataset
from toy_models import LitMLP, toy_examples

import lightning_spectral as ls
from lightning_spectral.client.batches import ClientData
from lightning_spectral.client.device import Device, Instructions
from lightning_spectral.client.local_hooks import LocalHook
from lightning_spectral.client.local_loop import LocalSettings
from lightning_spectral.protocol.codec import decode, encode
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor

Parts = tuple[bytes, bytes]


class Worker:
    """Another process, which acts as one device after another, since starting it takes longer than most tests."""

    def __init__(self) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self._process = started(serve, theirs, daemon=True)

    def close(self) -> None:
        """End the process."""
        self.pipe.send_bytes(b"")
        self._process.join(timeout=60)


@dataclass
class OtherProcess(Executor):
    """Sends downloads to another process, and reads uploads, which it yields in reverse.

    Attributes:
        worker: The process.
        instructions: What the device is told.
        module: The user's module; sent at the start, as are the instructions.
        optimizers: The user's optimizers; sent together with the module, so that they are over its parameters there.
        make_data: Called in the other process, which has its own data. Its result maps a download to the client's data.
        local_hooks: Hooks that act while clients train; also sent at the start.
        keeps: Whether the device keeps anything for the next download; if not, it is a new one each time.
        sent: Everything that was sent after the start.
        received: Everything that came back.
    """

    worker: Worker
    instructions: Instructions
    module: Any
    optimizers: Sequence[Optimizer]
    make_data: Callable[[], Callable[[Download], ClientData]]
    local_hooks: tuple[LocalHook, ...] = ()
    keeps: bool = True
    sent: list[Parts] = field(default_factory=list)
    received: list[Parts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start()

    def _start(self) -> None:
        start = self.instructions, self.module, self.optimizers, self.make_data, self.local_hooks
        self.worker.pipe.send_bytes(pickle.dumps(start))

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        """Yield uploads in reverse order: each is a copy, so any order will do."""
        yield from reversed([decode(*self._ask(encode(download)), Upload) for download in downloads])

    def _ask(self, download: Parts) -> Parts:
        if not self.keeps:
            self.close()
            self._start()
        send(self.worker.pipe, download)
        upload = receive(self.worker.pipe)
        self.sent.append(download)
        self.received.append(upload)
        return upload

    def close(self) -> None:
        """End the device; the process waits for the next one."""
        send(self.worker.pipe, (b"", b""))


def send(pipe: Connection, parts: Parts) -> None:
    for part in parts:
        pipe.send_bytes(part)


def receive(pipe: Connection) -> Parts:
    return pipe.recv_bytes(), pipe.recv_bytes()


def serve(pipe: Connection) -> None:
    """Run devices in the other process; they see neither the server nor the round."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while start := pipe.recv_bytes():
        told, module, optimizers, make_data, local_hooks = pickle.loads(start)
        device = Device(module, told, optimizers, make_data(), LocalSettings(local_hooks=local_hooks), owned=True)
        while (download := receive(pipe))[0]:
            send(pipe, encode(device.run(decode(*download, Download))))


def toy_data() -> ls.FederatedDataModule:
    """The same data in every process."""
    toy = toy_examples()
    return ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=12), val=toy, batch_size=4)


def sorted_data() -> ls.FederatedDataModule:
    """Clients with few classes: ten examples each, in the order of their labels."""
    tensors = toy_examples().tensors
    toy = TensorDataset(*(tensor[tensors[1].argsort(stable=True)] for tensor in tensors))
    return ls.FederatedDataModule(toy, ls.NaturalPartitioner([i // 10 for i in range(len(toy))]), val=toy, batch_size=4)


def sorted_data_of_clients() -> Callable[[Download], ClientData]:
    return sorted_data().client_data


def data_of_clients() -> Callable[[Download], ClientData]:
    return toy_data().client_data


class LitPlain(LitMLP):
    """With plain SGD, which SCAFFOLD needs."""

    def __init__(self) -> None:
        super().__init__(momentum=0.0)


class LitFrozen(LitMLP):
    """The first layer is frozen, yet every step of a client writes to it, as in modules that keep an average."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.net[0].weight.mul_(1.01)
        return super().training_step(batch, batch_idx)


class Unpicklable(RuntimeError):
    """An error that cannot be pickled."""

    def __init__(self, what: Callable[[], None]) -> None:
        super().__init__("the sensor is broken")
        self.what = what


class LitFails(LitMLP):
    """Fails on every client."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise Unpicklable(lambda: None)
