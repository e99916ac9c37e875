"""Tensors as bytes: their values in the order of their indices, beside a type and a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lightning_spectral.errors import RecordError

MOST_DIMENSIONS = 64
MOST_VALUES = 2**56  # torch computes strides in 64 bits, also those of empty tensors
_FLOATS = ("float64", "float32", "float16", "bfloat16", "complex128", "complex64")
_FLOATS_OF_A_BYTE = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_WHOLE = ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in (*_FLOATS, *_FLOATS_OF_A_BYTE, *_WHOLE) if hasattr(torch, name)
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Spec = tuple[torch.dtype, tuple[int, ...]]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values; they are the tensor's own memory if it is contiguous and on the CPU.

    Example:
        >>> raw_bytes(torch.tensor([1, 258], dtype=torch.int16)).tolist()
        [1, 0, 2, 1]
    """
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # a contiguous tensor may have any stride along dimensions of length 0 or 1, which torch cannot view as bytes
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8).numpy().data


def check_dense(tensor: Tensor, where: str) -> None:
    """Raise ``RecordError`` unless a tensor has values, one after another, of a type that can be sent."""
    if tensor.layout is not torch.strided or tensor.dtype not in _NAMES or tensor.is_meta:
        kind = f"{tensor.dtype}, {tensor.layout}, on device {tensor.device}"
        raise RecordError(f"{where} cannot be sent: it is not a dense tensor of a standard type, but {kind}.")


def describe(tensor: Tensor) -> list[str | list[int]]:
    """The name of a tensor's type, and its shape."""
    return [_NAMES[tensor.dtype], list(tensor.shape)]


def read_tensors(described: object, values: memoryview) -> list[Tensor]:
    """Make the tensors that lie in some bytes one after another.

    Args:
        described: What `describe` returned for each of them.
        values: Their bytes.

    Raises:
        RecordError: If they are not described like that, or do not need exactly these bytes; nothing is allocated then.
    """
    if not isinstance(described, list):
        raise RecordError("The record has no list of its tensors.")
    specs = [_spec(one) for one in described]
    ends = list(accumulate((math.prod(shape) * dtype.itemsize for dtype, shape in specs), initial=0))
    if ends[-1] != len(values):
        raise RecordError(f"The record's tensors need {ends[-1]} bytes by their shapes, but have {len(values)}.")
    return [_read(spec, values[ends[i] : ends[i + 1]]) for i, spec in enumerate(specs)]


def _spec(described: object) -> Spec:
    match described:
        case [str(name), list(shape)] if name in DTYPES and _is_shape(shape):
            return DTYPES[name], tuple(shape)
        case [str(name), _] if name not in DTYPES:
            raise RecordError(
                f"The record holds a tensor of the type {name[:40]!r}, which torch {torch.__version__} lacks."
            )
    raise RecordError("The record describes a tensor by something else than a type and a shape.")


def _is_shape(lengths: Sequence[object]) -> bool:
    whole = [length for length in lengths if type(length) is int and length >= 0]
    return len(whole) == len(lengths) <= MOST_DIMENSIONS and math.prod(max(n, 1) for n in whole) <= MOST_VALUES


def _read(spec: Spec, values: memoryview) -> Tensor:
    dtype, shape = spec
    tensor = torch.empty(shape, dtype=dtype)  # aligned as always, because matrix products may round differently if not
    raw_bytes(tensor)[:] = values
    if dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise RecordError("The record holds a Boolean tensor with values other than 0 and 1.")
    return tensor
