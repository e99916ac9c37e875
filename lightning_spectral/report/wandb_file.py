"""Reads the ``.wandb`` file of an offline run of Weights & Biases.

wandb has no reader of its own for these files. They are logs in LevelDB's format, in blocks of 32 KiB: each piece of a
record is preceded by its checksum, length and type. A record is a message of wandb's own protocol.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_spectral.errors import ReportError
from lightning_spectral.report.files import (
    LOG_MEGABYTES,
    MALFORMED,
    TEXT_MEGABYTES,
    check_inside,
    not_installed,
    read_bytes,
    unreadable,
)
from lightning_spectral.report.media import LeftOut, LoggedTable, Media, as_histogram, as_table
from lightning_spectral.report.runs import NOT_ENDED, LoggedRun, build_run

FILE_HEADER = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
BLOCK_BYTES = 32 * 1024
PIECE = struct.Struct("<IHB")  # checksum, length, type
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def read_wandb(path: Path) -> LoggedRun:
    """Read an offline run, with the tables in the folder ``files`` next to it.

    If the end of a file is missing, as for a run that was killed, its whole records up to there are read.
    """
    content = read_bytes(path, LOG_MEGABYTES)
    if content[: len(FILE_HEADER)] != FILE_HEADER:
        raise ReportError(f"{path} is not a wandb run: its header is missing. Was it copied completely?")
    messages = _messages(path, content)
    config: dict[str, Any] = {}
    logged: list[dict[str, Any]] = []
    left_out: list[str] = []
    name, identity, ended, missing = path.stem, "", False, 0
    for message in messages:
        for update in (*message.config.update, *message.run.config.update):
            config["/".join(update.nested_key) or update.key] = json.loads(update.value_json)
        if message.HasField("run"):
            identity = message.run.run_id
            name = message.run.display_name or identity or name
        if message.HasField("history"):
            entry = _entry(message.history, path.parent / "files")
            missing += sum(value is None for value in entry.values())
            left_out += [value.reason for value in entry.values() if isinstance(value, LeftOut)]
            logged.append(entry)
        ended = ended or message.HasField("exit")
    config.pop("_wandb", None)
    run = build_run(name, path, config, logged).identified(identity)
    return run.noting(
        *([NOT_ENDED] if not ended else []),
        *([f"{missing} tables are not in the folder `files` beside the run"] if missing else []),
        *([f"{len(left_out)} tables or histograms are left out, the first because {left_out[0]}"] if left_out else []),
    )


def whole_records(content: bytes) -> Iterator[bytes]:
    """The records of a log, which begins with its header, up to its end or the first one that is not whole."""
    start, pieces = len(FILE_HEADER), bytearray()
    while start + PIECE.size <= len(content):
        left_in_block = BLOCK_BYTES - start % BLOCK_BYTES
        if left_in_block < PIECE.size:  # too short for a piece: padding
            start += left_in_block
            continue
        checksum, length, kind = PIECE.unpack_from(content, start)
        data = content[start + PIECE.size : start + PIECE.size + length]
        if len(data) < length or zlib.crc32(data, zlib.crc32(bytes([kind]))) != checksum:
            return
        start += PIECE.size + length
        if kind in (FULL, FIRST):
            pieces.clear()
        pieces += data
        if kind in (FULL, LAST):
            yield bytes(pieces)


def _messages(path: Path, content: bytes) -> Iterator[Any]:
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]
    except ModuleNotFoundError as missing:
        raise not_installed(path, "wandb") from missing
    try:
        yield from map(Record.FromString, whole_records(content))
    except DecodeError as error:
        raise unreadable(path, error) from error


def _entry(history: Any, files: Path) -> dict[str, Any]:
    """Values that were logged together, with tables and histograms; ``None`` for a table whose file is missing."""
    nested: dict[str, Any] = {}
    for item in history.item:
        *outer, name = item.nested_key or [item.key]
        inner = nested
        for part in outer:  # the fields of a table or a histogram come one by one
            inner = inner.setdefault(part, {})
        inner[name] = json.loads(item.value_json)
    return dict(_flat("", nested, files))


def _flat(name: str, value: Any, files: Path) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
    elif "_type" in value:
        yield name, _media(name, value, files)
    else:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else key, inner, files)  # as wandb itself shows nested values


def _media(name: str, value: Mapping[str, Any], files: Path) -> Media | LeftOut | str | None:
    """A table or histogram; for anything else, the name of its type; ``None`` for a table whose file is missing."""
    try:
        if value["_type"] == "histogram" and "bins" in value:
            return as_histogram(value["bins"], value["values"])
        return _table(files / value["path"], files) if value["_type"] == "table-file" else str(value["_type"])
    except MALFORMED as error:
        return LeftOut(f"`{name}` cannot be read: {error}")


def _table(path: Path, files: Path) -> LoggedTable | None:
    check_inside(files, files.parent)
    check_inside(path, files)
    if not path.exists():
        return None
    table = json.loads(read_bytes(path, TEXT_MEGABYTES))
    return as_table(table["columns"], table["data"])
