"""A device as what answers messages: it says who it is, and trains."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping

from torch import Tensor, nn

from lightning_spectral.client.device import Device
from lightning_spectral.errors import RecordError
from lightning_spectral.network.device.client_data import ClientData
from lightning_spectral.network.device.evaluation import evaluated
from lightning_spectral.network.device.workplace import Workplace, check_accelerator
from lightning_spectral.network.messages import (
    DIGEST,
    EVALUATE,
    LACKS,
    MODEL,
    PRECISION,
    REFUSED,
    START,
    TRAIN,
    WHO,
    Identity,
    Parts,
    Start,
    digest_of,
    identity_parts,
    record_of,
    record_parts,
)
from lightning_spectral.network.objects import read_object
from lightning_spectral.protocol.codec import read_tensors, write_tensors
from lightning_spectral.protocol.frozen_base import digest
from lightning_spectral.protocol.records import Download, Failure, Upload

log = logging.getLogger(__name__)
Memory = MutableMapping[str, bytes]


def answered(answer: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    """An answer; or if there is an exception, which the device logs, the answer that says so."""
    try:
        return answer()
    except RecordError as error:
        return {REFUSED: str(error).encode()}
    except Exception as error:
        log.exception("A message could not be answered.")
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return {REFUSED: what.encode()}


class DeviceService:
    """Answers the server's messages for one client.

    What must outlive a message is in ``memory``, because the next one may find another process: the `Start` of each
    model, and the frozen tensors. A device that has lost it says so, and is sent it again.

    Args:
        modules: Makes the user's module, by the model's name; an only model has an empty one.
        data: The client's data, likewise.
        client: The client's name.
        trusted: Packages besides this one whose dataclasses the server may send: those of the user's own code.
        accelerator: Where the device trains, as for a Trainer.
    """

    def __init__(
        self,
        modules: Mapping[str, Callable[[], nn.Module]],
        data: Mapping[str, ClientData],
        client: str,
        trusted: Collection[str] = (),
        accelerator: str = "auto",
    ) -> None:
        self.modules, self.data, self.client = modules, data, client
        self.trusted, self.accelerator = frozenset(trusted), accelerator
        self._devices: dict[tuple[bytes, float], tuple[str, Workplace, Device]] = {}

    def answer(self, question: str, parts: Parts, memory: Memory) -> dict[str, bytes]:
        """Answer one message; whatever is wrong with it, or with this device, is said in the answer.

        Args:
            question: `WHO`, `TRAIN` or `EVALUATE`.
            parts: The message.
            memory: What the device keeps between messages; changed in place.
        """
        return answered(lambda: self._answer(question, parts, memory))

    def _answer(self, question: str, parts: Parts, memory: Memory) -> dict[str, bytes]:
        if question == WHO:
            return identity_parts(self.identity())
        if question == TRAIN:
            return self._train(parts, memory)
        if question == EVALUATE:
            return self._evaluate(parts)
        raise RecordError(f"This device does not know the question {question!r}.")

    def identity(self) -> Identity:
        """Who the device is, and what it has for each model; ``ValueError`` if it could not train."""
        check_accelerator(self.accelerator)
        return Identity(self.client, {name: data.holding() for name, data in self.data.items()})

    def _train(self, parts: Parts, memory: Memory) -> dict[str, bytes]:
        known = parts.get(DIGEST, b"")
        if START in parts and digest_of(parts[START]) == known:
            memory[f"start {known.decode()}"] = parts[START]
        if f"start {known.decode()}" not in memory:
            return {LACKS: known}
        download = record_of(parts, Download)
        model, workplace, device = self._device(known, download.capacity, memory)
        if not device.kept.tensors:
            placed = {n: (d, t.to(workplace.torch_device)) for n, (d, t) in read_kept(memory, model).items()}
            device.kept.tensors.update(placed)
        device.generators.save()
        try:
            upload = device.run(workplace.arrive(download))
        finally:
            device.generators.restore()
        if download.frozen and not upload.missing:
            write_kept(memory, model, device.kept.tensors)
        return record_parts(upload)

    def _evaluate(self, parts: Parts) -> dict[str, bytes]:
        model, download = parts.get(MODEL, b"").decode(), record_of(parts, Download)
        self._check_model(model)
        if not (data := self.data[model]).holding().num_held_out:
            raise RecordError("This client has no held-out examples.")
        try:
            workplace = Workplace(self.accelerator, parts.get(PRECISION, b"32-true").decode())
            logged = evaluated(self.modules[model](), data, workplace, download)
        except Exception as error:
            failure = Failure("evaluation", f"{type(error).__name__}: {error}")
            return record_parts(Upload(download.unit, {}, left_out="error", failure=failure))
        return record_parts(Upload(download.unit, {}, logged=logged))

    def _check_model(self, model: str) -> None:
        if model not in self.modules or model not in self.data:
            raise RecordError(f"This device has no model {model!r}; it has {sorted(self.data)}.")

    def _device(self, known: bytes, capacity: float, memory: Memory) -> tuple[str, Workplace, Device]:
        key = known, capacity
        if key not in self._devices:
            start = read_object(memory[f"start {known.decode()}"], Start, self.trusted)
            self._check_model(start.model)
            workplace = Workplace(self.accelerator, start.precision, start.num_rounds)
            module, data = self.modules[start.model](), self.data[start.model].batches
            self._devices[key] = start.model, workplace, workplace.make_device(module, start, data)
        return self._devices[key]


def write_kept(memory: Memory, model: str, kept: Mapping[str, tuple[str, Tensor]]) -> None:
    """Write the frozen tensors that a device keeps from message to message, unless they are what was written last."""
    digests = json.dumps({name: known for name, (known, _) in kept.items()}).encode()
    if memory.get(f"kept digests {model}") != digests:
        memory[f"kept {model}"] = write_tensors({name: tensor for name, (_, tensor) in kept.items()})
        memory[f"kept digests {model}"] = digests


def read_kept(memory: Memory, model: str) -> dict[str, tuple[str, Tensor]]:
    """The frozen tensors that an earlier process wrote; what is damaged counts as lost."""
    try:
        digests = json.loads(memory[f"kept digests {model}"])
        tensors = read_tensors(memory[f"kept {model}"])
    except (KeyError, ValueError, RecordError):
        return {}
    return {name: (digests[name], t) for name, t in tensors.items() if digests.get(name) == digest(t)}
