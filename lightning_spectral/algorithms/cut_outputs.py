"""Tensors of which clients hold only the leading entries: what travels, and how the change is padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn


def leading_entries(tensors: Mapping[str, Tensor], held: Mapping[str, int]) -> dict[str, Tensor]:
    """Named tensors, some of them cut to their leading entries; views.

    Args:
        tensors: By name.
        held: Number of entries of the first dimension to keep, by name; other tensors stay whole.

    Example:
        >>> import torch
        >>> leading_entries({"a": torch.arange(3), "b": torch.arange(3)}, {"b": 2})
        {'a': tensor([0, 1, 2]), 'b': tensor([0, 1])}
    """
    return {name: tensor[: held[name]] if name in held else tensor for name, tensor in tensors.items()}


def of_whole_tensors(
    changes: Iterable[tuple[str, Tensor]], server: nn.Module, held: Mapping[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Pad changes of leading entries to the server's tensors: entries that no client holds do not change.

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
