"""Tensors of which clients hold the leading entries only: what of them travels, and what becomes of the change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn


def leading_entries(tensors: Mapping[str, Tensor], held: Mapping[str, int]) -> dict[str, Tensor]:
    """Named tensors, of some only the leading entries; views.

    Args:
        tensors: By name.
        held: How many entries of the first dimension, by name; others stay whole.

    Example:
        >>> import torch
        >>> leading_entries({"a": torch.arange(3), "b": torch.arange(3)}, {"b": 2})
        {'a': tensor([0, 1, 2]), 'b': tensor([0, 1])}
    """
    return {name: tensor[: held[name]] if name in held else tensor for name, tensor in tensors.items()}


def of_whole_tensors(
    changes: Iterable[tuple[str, Tensor]], server: nn.Module, held: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """The changes of leading entries as those of the server's tensors: entries that nobody holds do not change.

    Args:
        changes: Names and changes, read one at a time.
        server: The server's module.
        held: Names of the tensors that are cut.
    """
    for name, change in changes:
        yield name, with_absent_rows(change, len(server.get_parameter(name))) if name in held else change


def with_absent_rows(change: Tensor, num_rows: int) -> Tensor:
    """A change of leading rows, followed by zeros.

    Example:
        >>> import torch
        >>> with_absent_rows(torch.ones(2), 3)
        tensor([1., 1., 0.])
    """
    if len(change) == num_rows:
        return change
    whole = change.new_zeros(num_rows, *change.shape[1:])
    whole[: len(change)] = change
    return whole
