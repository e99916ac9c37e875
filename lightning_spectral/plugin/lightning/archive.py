"""A checkpoint as an archive that torch wrote: its layout, and what the pickle in it describes; nothing is executed."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch

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
    """Check that entries, directory and end follow one another without a gap, and that no entry is compressed.

    Python and torch read different fields of an archive. A checksum that Python has compared says nothing about what
    torch loads, unless both agree on where each entry begins and ends.
    """
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
    return [min(value, 0xFFFFFFFF) for value in values]


# Newer data types are saved as untyped bytes.
ITEM_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "ComplexDouble": 16, "ComplexFloat": 8, "Untyped": 1}
ITEM_BYTES |= {"Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}
ITEM_BYTES |= {"QInt32": 4, "QInt8": 1, "QUInt8": 1, "QUInt4x2": 1, "QUInt2x4": 1}
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def read_structure(archive: ZipFile) -> Any:
    """The object in a checkpoint whose layout is right, with stand-ins for everything but plain values and containers.

    Every class and function that the pickle names is replaced by a stand-in, which also checks what torch does not:
    that a tensor's bytes are in the file, and that nothing takes more memory than the file does.
    """
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if "data.pkl" not in entries:
        raise DamagedFile("it has no data.pkl, which torch.save writes")
    content = archive.read(entries["data.pkl"])  # compares the checksum
    for opcode, argument, _ in pickletools.genops(content):
        if opcode.name in PUTS and isinstance(argument, int) and argument > len(content):
            raise DamagedFile("its pickle numbers more objects than it has")  # Python would allocate room for them
    sizes = {name.removeprefix("data/"): entry.file_size for name, entry in entries.items()}
    return _Reader(content, sizes).load()


class _Reader(pickle.Unpickler):
    """Imports nothing, and calls nothing but stand-ins."""

    def __init__(self, content: bytes, sizes: Mapping[str, int]) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")
        self._sizes = sizes

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if module.partition(".")[0] != "torch":
            return _ByteArray if name == "bytearray" else _Empty
        return _OF_TORCH.get(name, _Allocation if name.endswith("Tensor") else _Empty)

    def persistent_load(self, saved_id: Any) -> Any:
        """Compare the size of a storage with that of its entry."""
        _, kind, key, _, count = saved_id
        if key not in self._sizes or self._sizes[key] // kind.item_bytes != count:
            raise DamagedFile(f"data/{key} does not hold the {count} numbers that its tensor needs")
        return _Numbers(count, kind.item_bytes)


class _Empty(dict[Any, Any]):
    """Stands in for an object of any class, and takes whatever state it is given."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __new__(cls, *args: Any, **options: Any) -> _Empty:
        return dict.__new__(cls)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

    def __call__(self, *args: Any, **options: Any) -> _Empty:
        return self

    def __setstate__(self, state: Any) -> None: ...

    def append(self, value: Any) -> None: ...

    def extend(self, values: Any) -> None: ...


@dataclass(frozen=True)
class _Numbers:
    """Stands in for a storage."""

    count: int
    item_bytes: int


class _Tensor(_Empty):
    """Stands in for the functions that make a tensor of a part of a storage."""

    def __new__(cls, numbers: _Numbers, offset: int, size: Any, stride: Any, *rest: Any) -> Any:
        item_bytes = next((value.itemsize for value in rest if isinstance(value, torch.dtype)), numbers.item_bytes)
        end = 1 + offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if min(size, default=1) > 0 and end * item_bytes > numbers.count * numbers.item_bytes:
            raise DamagedFile(f"a tensor of shape {tuple(size)} does not fit into its {numbers.count} numbers")
        return super().__new__(cls)


class _TypedTensor(_Empty):
    """Stands in for the function that makes a tensor and then sets its class."""

    def __new__(cls, function: Any, _: Any, args: Any, *state: Any) -> Any:
        return function(*args)


class _Allocation(_Empty):
    """Stands in for classes that no checkpoint calls, because a call with a number allocates that much memory."""

    def __new__(cls, *args: Any) -> Any:
        raise DamagedFile("its pickle allocates memory that the file does not fill")


class _ByteArray(_Empty):
    """Stands in for ``bytearray``, of which only a call with a number allocates memory."""

    def __new__(cls, *args: Any) -> Any:
        return _Allocation(*args) if args and isinstance(args[0], int) else super().__new__(cls)


_OF_TORCH: Mapping[str, Any] = {
    **{f"{name}Storage": type(name, (_Allocation,), {"item_bytes": size}) for name, size in ITEM_BYTES.items()},
    "TypedStorage": _Allocation,
    **dict.fromkeys(("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_qtensor"), _Tensor),
    "_rebuild_from_type_v2": _TypedTensor,
}
