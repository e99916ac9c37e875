"""Records as bytes, for executors whose devices are in other processes or on other machines.

A record is a header, its plain data as JSON, and the values of its tensors::

    magic (8 bytes) | version (2) | length of the plain data (8) | of the tensors (8) | SHA-256 of all the rest (32)
    {"record": "Upload", "byteorder": "little", "tensors": [["float32", [2, 3]], ...], "fields": ...}
    values of the first tensor | of the second | ...

Nothing in it is executed, and nothing is allocated for tensors that did not arrive. The checksum finds damage, not
forgery: over a network, peers must be authenticated by other means, such as TLS.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from lightning_spectral.errors import RecordError
from lightning_spectral.protocol.plain_data import conform, pack, unpack
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.protocol.tensor_bytes import describe, raw_bytes, read_tensors

MAGIC = b"spectral"
VERSION = 2  # raise it when a field of a record, or anything else that is written, changes
MOST_PLAIN_BYTES = 2**24
_PREFIX = struct.Struct("<8sHQQ")
_HEADER_BYTES = _PREFIX.size + hashlib.sha256().digest_size

Record = TypeVar("Record", Download, Upload)


def encode(record: Download | Upload) -> bytes:
    """Write a record as bytes; equal records give equal bytes.

    The frozen tensors that a client already has are left out of its download, and exceptions out of failures.

    Raises:
        RecordError: If it holds anything but numbers, text and dense tensors, and tuples, lists and mappings of them.

    Example:
        >>> import torch
        >>> from lightning_spectral.protocol.work_unit import WorkUnit
        >>> upload = Upload(WorkUnit(3), {"weight": torch.tensor([1.0, -0.0])}, num_steps=5)
        >>> decode(encode(upload), Upload).tensors
        {'weight': tensor([1., -0.])}
    """
    if isinstance(record, Download):
        record = replace(record, tensors=record.travelling)
    return encode_plain(record, type(record).__name__)


def encode_plain(value: Any, name: str) -> bytes:
    """Write any value that `plain_data.pack` accepts as bytes, as a record of a name.

    Example:
        >>> decode_plain(encode_plain(("hello", 3), "Greeting"), "Greeting")
        ('hello', 3)
    """
    tensors = list[Tensor]()
    fields = pack(value, tensors, name)
    content = {"record": name, "byteorder": sys.byteorder, "tensors": [*map(describe, tensors)], "fields": fields}
    written = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    plain = written.encode("utf-8", "surrogatepass")  # every str of Python
    if len(plain) > MOST_PLAIN_BYTES:
        raise RecordError(f"{name} holds {len(plain)} bytes besides its tensors; at most {MOST_PLAIN_BYTES} are sent.")
    values = [raw_bytes(tensor) for tensor in tensors]
    prefix = _PREFIX.pack(MAGIC, VERSION, len(plain), sum(map(len, values)))
    return b"".join([prefix, _checksum(prefix, plain, *values), plain, *values])


def decode(data: bytes | bytearray | memoryview, kind: type[Record]) -> Record:
    """Read a record that `encode` wrote: the same values, and tensors of the same bits, on the CPU.

    Values need not be finite; the server leaves out such updates wherever they come from.

    Args:
        data: The bytes; the record shares no memory with them.
        kind: `Download` or `Upload`.

    Raises:
        RecordError: If the bytes are not a complete and undamaged record of this kind and version.
    """
    record: Record = conform(decode_plain(data, kind.__name__), kind, kind.__name__)
    return record


def decode_plain(data: bytes | bytearray | memoryview, name: str) -> Any:
    """Read a value that `encode_plain` wrote as a record of a name; whether it makes sense is for the caller to check.

    Raises:
        RecordError: If the bytes are not a complete and undamaged record of this name and version.
    """
    plain, values = _split(memoryview(data).cast("B"))
    content = _parse(plain)
    if content["record"] != name:
        raise RecordError(f"Expected a record of type {name}, got another type.")
    if content["byteorder"] != sys.byteorder:
        raise RecordError(f"The record was written on a machine that is not {sys.byteorder}-endian, unlike this one.")
    return unpack(content["fields"], read_tensors(content["tensors"], values), name)


def head_and_values(data: bytes) -> tuple[memoryview, memoryview]:
    """Divide a whole record into what is its own and the values of its tensors, which other records may share.

    Example:
        >>> import torch
        >>> record = encode_plain(torch.arange(3), "Numbers")
        >>> [len(part) for part in head_and_values(record)], len(record)
        ([147, 24], 171)
    """
    _, _, num_plain, _ = _PREFIX.unpack_from(data)
    whole = memoryview(data)
    return whole[: _HEADER_BYTES + num_plain], whole[_HEADER_BYTES + num_plain :]


def _checksum(*parts: bytes | memoryview) -> bytes:
    hashed = hashlib.sha256()
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def _split(data: memoryview) -> tuple[memoryview, memoryview]:
    """The plain data and the values of the tensors, exactly as they were written."""
    if data[: len(MAGIC)] != MAGIC[: len(data)]:
        raise RecordError("These bytes are not a record of lightning_spectral.")
    if len(data) < _HEADER_BYTES:
        raise RecordError(f"The record is truncated: {len(data)} bytes arrived of a header of {_HEADER_BYTES}.")
    _, version, num_plain, num_values = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise RecordError(
            f"The record was written by version {version} of the format; this is version {VERSION}. Install the same "
            "version of lightning_spectral on the server and on all devices."
        )
    expected = _HEADER_BYTES + num_plain + num_values
    if len(data) < expected:
        raise RecordError(f"The record is truncated: {len(data)} of {expected} bytes arrived.")
    if len(data) > expected:
        raise RecordError(f"The record has {len(data) - expected} bytes too many; it ends after {expected}.")
    if num_plain > MOST_PLAIN_BYTES:
        raise RecordError(
            f"The record holds {num_plain} bytes besides its tensors; at most {MOST_PLAIN_BYTES} are read."
        )
    body = data[_HEADER_BYTES:]
    if _checksum(data[: _PREFIX.size], body) != data[_PREFIX.size : _HEADER_BYTES]:
        raise RecordError("The record is damaged: its checksum does not match.")
    return body[:num_plain], body[num_plain:]


def _parse(plain: memoryview) -> dict[str, Any]:
    try:
        content = json.loads(str(plain, "utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise RecordError("The record's plain data is not JSON, or is nested too deeply.") from error
    if not isinstance(content, dict) or content.keys() != {"record", "byteorder", "tensors", "fields"}:
        raise RecordError("The record's plain data does not say what it holds.")
    return content
