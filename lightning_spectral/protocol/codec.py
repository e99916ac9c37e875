"""Records as bytes, for executors whose devices are in other processes or on other machines.

A record is two parts: a head, which holds its typed fields as MessagePack, and the values of its tensors as
safetensors, so that values which all clients get are the same bytes, and can be sent once. Nothing in them is
executed, and nothing is allocated for tensors that did not arrive. The head begins with a SHA-256 of all the rest,
which finds damage, not forgery: over a network, peers must be authenticated by other means, such as TLS.

Needs msgspec and safetensors, the extra ``network``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.errors import RecordError, from_extra
from lightning_spectral.protocol.records import Download, Upload

with from_extra("network"):
    from msgspec import MsgspecError, Raw, msgpack
    from safetensors import torch as safetensors

VERSION = 7  # raise it when a field of a record, or anything else that is written, changes
MOST_HEAD_BYTES = 2**24
_TENSOR = 1  # MessagePack's code for what holds the position of a tensor
_SUM_BYTES = hashlib.sha256().digest_size
Record = TypeVar("Record", Download, Upload)


def encode(record: Download | Upload) -> tuple[bytes, bytes]:
    """Write a record as a head and the values of its tensors; equal records give equal bytes.

    The frozen tensors that a client already has are left out of its download, and exceptions out of failures.

    Raises:
        RecordError: If it holds anything but numbers, text and dense tensors, and tuples, lists and mappings of them.

    Example:
        >>> from lightning_spectral.protocol.records import WorkUnit
        >>> upload = Upload(WorkUnit(3), {"weight": torch.tensor([1.0, -0.0])}, num_steps=5)
        >>> decode(*encode(upload), Upload).tensors
        {'weight': tensor([1., -0.])}
    """
    if isinstance(record, Download):
        record = replace(record, tensors=record.travelling)
    name, tensors = type(record).__name__, list[Tensor]()

    def packed(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return msgpack.Ext(_TENSOR, (len(tensors) - 1).to_bytes(4, "big"))
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Exception):
            return None
        raise TypeError(f"it holds a {type(value).__name__}, and records hold numbers, text and tensors")

    try:
        head = msgpack.encode((VERSION, name, record), enc_hook=packed)
    except (MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise RecordError(f"The {name} cannot be sent: {error}.") from error
    if len(head) > MOST_HEAD_BYTES:
        raise RecordError(f"{name} holds {len(head)} bytes besides its tensors; at most {MOST_HEAD_BYTES} are sent.")
    values = write_tensors({str(position): tensor for position, tensor in enumerate(tensors)})
    return _checksum(head, values) + head, values


def decode(head: bytes, values: bytes, kind: type[Record]) -> Record:
    """Read a record that `encode` wrote: the same values, and tensors of the same bits, on the CPU.

    Values need not be finite; the server leaves out such updates wherever they come from. Lists among the options of a
    download arrive as tuples.

    Args:
        head: The head.
        values: The values of its tensors; the record shares no memory with them.
        kind: `Download` or `Upload`.

    Raises:
        RecordError: If the bytes are not a complete and undamaged record of this kind and version.
    """
    if len(head) > MOST_HEAD_BYTES + _SUM_BYTES:
        raise RecordError(
            f"The record holds {len(head)} bytes besides its tensors; at most {MOST_HEAD_BYTES} are read."
        )
    plain = memoryview(head)[_SUM_BYTES:]
    if _checksum(plain, values) != head[:_SUM_BYTES]:
        raise RecordError("The record is damaged or truncated: its checksum does not match.")
    try:
        version, name, fields = msgpack.decode(plain, type=tuple[int, str, Raw])
        if version != VERSION:
            raise RecordError(
                f"The record was written by version {version} of the format; this is version {VERSION}. Install the "
                "same version of lightning_spectral on the server and on all devices."
            )
        if name != kind.__name__:
            raise RecordError(f"Expected a record of type {kind.__name__}, got another type.")
        tensors = read_tensors(values)
        record: Any = msgpack.decode(
            fields, type=kind, dec_hook=_checked, ext_hook=lambda _, at: tensors[str(int.from_bytes(at, "big"))]
        )
    except RecordError:
        raise
    except (MsgspecError, TypeError, ValueError, KeyError, RecursionError) as error:
        raise RecordError(f"The record cannot be read: {error}.") from error
    found: Record = replace(record, options=_as_tuples(record.options)) if kind is Download else record
    return found


def write_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Write named tensors as safetensors.

    Raises:
        RecordError: If one is not dense, or of a type that safetensors lacks.
    """
    for tensor in tensors.values():
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = f"{tensor.dtype}, {tensor.layout}, on device {tensor.device}"
            raise RecordError(f"A tensor cannot be sent: it is not a dense tensor, but {kind}.")
    values = {name: tensor.detach().resolve_conj().resolve_neg() for name, tensor in tensors.items()}
    try:  # one after another, on the CPU, in memory that no other tensor shares
        return safetensors.save({n: torch.empty(v.shape, dtype=v.dtype).copy_(v) for n, v in values.items()})
    except Exception as error:  # which one depends on the version of safetensors
        raise RecordError(f"A tensor cannot be sent: {type(error).__name__}: {error}.") from error


def read_tensors(data: bytes) -> dict[str, Tensor]:
    """Read what `write_tensors` wrote, into memory of torch's own.

    Raises:
        RecordError: If it is anything else.
    """
    try:
        found = safetensors.load(data)
    except Exception as error:  # of Rust, of Python and of torch
        raise RecordError(f"The record's tensors cannot be read: {type(error).__name__}: {error}.") from error
    for name, tensor in found.items():
        if tensor.dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
            raise RecordError("The record holds a Boolean tensor with values other than 0 and 1.")
        found[name] = tensor.clone()  # aligned as always, because matrix products may round differently if not
    return found


def _checked(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
    return value


def _as_tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_as_tuples, value))
    return {name: _as_tuples(inner) for name, inner in value.items()} if isinstance(value, dict) else value


def _checksum(*parts: bytes | memoryview) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()
