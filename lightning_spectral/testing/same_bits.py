"""Named tensors, compared bit for bit."""

from collections.abc import Mapping

from torch import Tensor

from lightning_spectral.protocol.frozen_base import digest

Tensors = Mapping[str, Tensor]


def assert_same_bits(found: Tensors, expected: Tensors, where: str) -> None:
    """Raise ``AssertionError``, which begins with ``where``, unless names, types, shapes and bits are the same."""
    assert found.keys() == expected.keys(), (
        f"{where}: only one of both has the tensors {', '.join(sorted(found.keys() ^ expected.keys()))}."
    )
    names = differing(found, expected)
    assert not names, (
        f"{where}: {len(names)} of {len(found)} tensors, first {names[0]!r}, "
        f"{_difference(found[names[0]], expected[names[0]])}."
    )


def differing(found: Tensors, expected: Tensors) -> list[str]:
    """Names of the tensors whose bits differ."""
    return [name for name, tensor in found.items() if digest(tensor) != digest(expected[name])]


def _difference(found: Tensor, expected: Tensor) -> str:
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} of shape {tuple(found.shape)}, not {expected.dtype} of shape {tuple(expected.shape)}"
    place = int((found.double() - expected.double()).abs().nan_to_num(float("inf")).argmax())
    values = found.reshape(-1)[place].item(), expected.reshape(-1)[place].item()
    return "most at index {}: {!r}, not {!r}".format(place, *values)
