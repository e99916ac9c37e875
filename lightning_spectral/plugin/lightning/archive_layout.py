"""Whether a zip archive is laid out as torch writes it, so that every reader finds the same bytes in it.

Python and torch read different fields of an archive. A checksum that Python has compared says nothing about what torch
loads, unless both agree on where each entry begins and ends.
"""

from __future__ import annotations

import struct
from typing import IO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

LOCAL_HEADER = struct.Struct("<4s5H3L2H")
DIRECTORY_HEADER = struct.Struct("<4s6H3L5H2L")
LARGE_END = struct.Struct("<4sQ2H2L4Q")  # for archives of more than 4 GB; torch always writes it
LOCATOR = struct.Struct("<4sLQL")
END = struct.Struct("<4s4H2LH")

FLAGS = 0x0808  # sizes follow the data; names are UTF-8
IS_FOLDER = 0x10  # torch skips what is marked as a folder, and takes uninitialised memory for its content
GAPS = (0, 16, 24)  # bytes between entries: none, or a repetition of checksum and sizes, short or long


class DamagedFile(Exception):
    """The file is not a checkpoint that can be loaded; the message says why."""


def check_layout(file: IO[bytes], archive: ZipFile) -> None:
    """Check that entries, directory and end follow one another without a gap, and that no entry is compressed."""
    entries = archive.infolist()
    _check_names([entry.filename for entry in entries])
    starts = [*(entry.header_offset for entry in entries), archive.start_dir]
    if starts[0] != 0:
        raise DamagedFile("it does not begin with an entry")
    for entry, start, following in zip(entries, starts, starts[1:], strict=False):
        _check_entry(file, entry, start, following)
    _check_end(file, len(entries), archive.start_dir)


def _check_names(names: list[str]) -> None:
    """Torch looks for entries in the folder of the first one, and does not distinguish capital letters."""
    if any(name.lower().endswith("constants.pkl") for name in names):
        raise DamagedFile("it is a TorchScript archive, which executes code when it is loaded")
    if len({name.partition("/")[0] for name in names}) != 1:
        raise DamagedFile("its entries are not in one folder")
    if len({name.lower() for name in names}) != len(names):
        raise DamagedFile("two of its entries have the same name")


def _check_entry(file: IO[bytes], entry: ZipInfo, start: int, following: int) -> None:
    """Check one entry, from the start of its header to the start of what follows."""
    if entry.external_attr & IS_FOLDER or entry.is_dir():
        raise DamagedFile(f"{entry.filename} is marked as a folder")
    compressed = entry.compress_type != ZIP_STORED or entry.compress_size != entry.file_size
    if compressed or entry.flag_bits & ~FLAGS or entry.volume:
        raise DamagedFile(f"{entry.filename} is not stored as torch stores it")
    file.seek(start)
    *_, name_length, extra_length = LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))
    end = start + LOCAL_HEADER.size + name_length + extra_length + entry.file_size
    if following - end not in GAPS:
        raise DamagedFile(f"{entry.filename} does not end where the next entry begins")


def _check_end(file: IO[bytes], count: int, start: int) -> None:
    """Check that the directory is followed by its own description and by nothing else."""
    file.seek(start)
    for _ in range(count):
        lengths = DIRECTORY_HEADER.unpack(file.read(DIRECTORY_HEADER.size))[10:13]
        file.seek(sum(lengths), 1)
    end = file.tell()
    size = end - start
    rest = file.read(LARGE_END.size + LOCATOR.size + END.size + 1)
    expected = [(END, (b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), *_cut(size, start), 0))]
    if len(rest) > END.size:
        _, _, made_by, needed, *_ = LARGE_END.unpack(rest[: LARGE_END.size])  # versions, which nobody reads
        large = (LARGE_END, (b"PK\6\6", LARGE_END.size - 12, made_by, needed, 0, 0, count, count, size, start))
        expected = [large, (LOCATOR, (b"PK\6\7", 0, end, 1)), *expected]
    if rest != b"".join(part.pack(*values) for part, values in expected):
        raise DamagedFile("its directory does not end where it should")


def _cut(*values: int) -> list[int]:
    """Numbers as a field of four bytes holds them."""
    return [min(value, 0xFFFFFFFF) for value in values]
