"""What the pickle in a checkpoint describes: plain values as they are, tensors checked but not read, nothing executed.

Every class and function that the pickle names is replaced by a stand-in, which also checks what torch does not: that a
tensor's bytes are in the file, and that nothing takes more memory than the file does.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zipfile import ZipFile

import torch

from lightning_spectral.plugin.lightning.archive_layout import DamagedFile

# Newer data types are saved as untyped bytes.
ITEM_BYTES = {"Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "ComplexDouble": 16, "ComplexFloat": 8, "Untyped": 1}
ITEM_BYTES |= {"Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1, "Bool": 1}
ITEM_BYTES |= {"QInt32": 4, "QInt8": 1, "QUInt8": 1, "QUInt4x2": 1, "QUInt2x4": 1}
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")


def read_structure(archive: ZipFile) -> Any:
    """The object in a checkpoint whose layout is right, with stand-ins for everything but plain values and containers.

    Raises:
        DamagedFile: If it is not an archive of `torch.save`, or describes more than it holds.
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
