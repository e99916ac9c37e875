"""The gate: whatever a device says is read and checked here, before the server uses anything of it.

Each reader raises `RecordError` if the answer is not what was asked for: the caller counts that as the failure of this
one client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_spectral.client.device import ClientSide
from lightning_spectral.client.forms import Forms
from lightning_spectral.errors import RecordError, from_extra
from lightning_spectral.network.line import Answer
from lightning_spectral.network.messages import IDENTITY, REFUSED, Identity, Parts, record_of
from lightning_spectral.protocol.codec import VERSION
from lightning_spectral.protocol.records import Download, Upload

with from_extra("network"):
    from msgspec import MsgspecError, msgpack

Form = Mapping[str, tuple[torch.dtype, torch.Size]]


def read_parts(answer: Answer) -> Parts:
    """The parts of an answer; `RecordError` if there is none, or the device refuses."""
    if answer.reason is not None:
        raise RecordError(answer.message or "no answer")
    if REFUSED in answer.parts:
        raise RecordError(answer.parts[REFUSED].decode(errors="replace"))
    return answer.parts


def read_identity(answer: Answer) -> Identity:
    """Who a device says that it is.

    Example:
        >>> from lightning_spectral.network.messages import Holding, identity_parts
        >>> read_identity(Answer("a ticket", identity_parts(Identity("ward 7", {"": Holding(80, 64)})))).holdings
        {'': Holding(num_examples=80, examples_per_epoch=64, keep_ratio=None, num_held_out=0, budget_bytes=None)}
    """
    data = read_parts(answer).get(IDENTITY, b"")
    try:
        identity = msgpack.decode(data, type=Identity)
    except (MsgspecError, ValueError, RecursionError) as error:
        raise RecordError(f"its identity cannot be read: {error}.") from error
    if identity.version != VERSION:
        raise RecordError(
            f"its records have version {identity.version} of the format, and those of the server {VERSION}; install "
            "the same version of lightning_spectral on both."
        )
    return identity


def read_metrics(answer: Answer) -> dict[str, float]:
    """What a device says of an evaluation: metrics by name."""
    upload = record_of(read_parts(answer), Upload)
    if upload.failure is not None:
        raise RecordError(upload.failure.message)
    return {name: logged.value for name, logged in upload.logged.items()}


class UploadGate:
    """Reads uploads, and compares them with what an untrained sub-model would send back.

    Args:
        module: The server's module, which takes the forms of clients.
        side: The device half of the algorithm.
    """

    def __init__(self, module: nn.Module, side: ClientSide) -> None:
        self._side, self._forms = side, Forms(module, side.take_form)
        self._usual: dict[float, Form] = {}

    def read(self, download: Download, answer: Answer) -> Upload:
        """The upload that answers a download; names, types and shapes of its tensors are right, values may be NaN.

        Forms that differ from download to download, as those of masks do, are computed when the usual one is not found.
        """
        upload = record_of(read_parts(answer), Upload)
        if upload.unit.key != download.unit.key:
            raise RecordError(f"it is about client {upload.unit.client_id}, and was sent by {download.unit.client_id}")
        if upload.left_out is None and not upload.missing:
            self._check_tensors(download, upload)
        return replace(upload, unit=download.unit)  # with the server's own coefficient

    def _check_tensors(self, download: Download, upload: Upload) -> None:
        found = _form_of(upload.tensors)
        if found != self._usual.get(download.capacity):
            with self._forms.client(download.capacity) as client:
                self._side.load(client, download)
                self._side.start(client, download)
                expected = _form_of(self._side.collect(client, download).tensors)
            self._usual[download.capacity] = expected
            if found != expected:
                raise RecordError(_difference(found, expected))
        for name, rows in upload.untrained_rows.items():
            if not (name in found and _are_rows(rows, found[name][1])):
                raise RecordError(f"the untrained rows of {name} are no rows of a tensor that was asked for")


def _form_of(tensors: Mapping[str, Tensor]) -> Form:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _are_rows(rows: Tensor, shape: torch.Size) -> bool:
    """Whether a tensor holds indices along the first dimension of a shape."""
    is_list = rows.dtype is torch.int64 and rows.dim() == 1 and len(shape) > 0
    return is_list and bool(((rows >= 0) & (rows < shape[0])).all())


def _difference(found: Form, expected: Form) -> str:
    if lacking := sorted(expected.keys() - found.keys()):
        return f"it lacks {', '.join(lacking)}"
    if unknown := sorted(found.keys() - expected.keys()):
        return f"it holds {', '.join(unknown)}, which was not asked for"
    name = next(name for name in found if found[name] != expected[name])
    (kind, shape), (wanted, size) = found[name], expected[name]
    return f"{name} is {kind} of shape {tuple(shape)}, and must be {wanted} of shape {tuple(size)}"
