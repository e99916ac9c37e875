"""Checks of what devices send back, before anything of it is summed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_spectral.client.forms import Forms
from lightning_spectral.client.side import ClientSide
from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.records import Download, Upload

Form = Mapping[str, tuple[torch.dtype, torch.Size]]


class ReplyChecks:
    """Compares uploads with what an untrained sub-model would send back: names, types and shapes of tensors.

    Args:
        module: The server's module, which takes the forms of clients.
        side: The device half of the algorithm.
    """

    def __init__(self, module: nn.Module, side: ClientSide) -> None:
        self._side, self._forms = side, Forms(module, side.take_form)
        self._usual: dict[float, Form] = {}

    def check(self, download: Download, upload: Upload) -> None:
        """Raise ``RecordError`` if an upload does not answer a download; values need not be finite.

        Forms that differ from download to download, as those of masks do, are computed when the usual one is not found.
        """
        if upload.unit.key != download.unit.key:
            raise RecordError(f"it is about client {upload.unit.client_id}, and was sent by {download.unit.client_id}")
        if upload.left_out is not None or upload.missing:
            return
        found = form_of(upload.tensors)
        if found != self._usual.get(download.capacity):
            expected = self._usual[download.capacity] = self._expected(download)
            if found != expected:
                raise RecordError(_difference(found, expected))
        for name, rows in upload.untrained_rows.items():
            if not (name in found and _are_rows(rows, found[name][1])):
                raise RecordError(f"it says rows of {name} that it has not trained in a way that cannot be read")

    def _expected(self, download: Download) -> Form:
        with self._forms.client(download.capacity) as client:
            self._side.load(client, download)
            self._side.start(client, download)
            return form_of(self._side.collect(client, download).tensors)


def form_of(tensors: Mapping[str, Tensor]) -> Form:
    """Type and shape of each tensor."""
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
