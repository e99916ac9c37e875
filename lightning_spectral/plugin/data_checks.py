"""Checks of the arguments of a data module, which name what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_spectral.errors import check_is
from lightning_spectral.partition import Partitioner


def check_dealt(train: Any, partitioner: Any) -> None:
    """Raise ``TypeError`` unless there is a data set, and something that deals it to clients."""
    if isinstance(train, Partitioner):
        raise TypeError(
            f"`train` must be a data set, got the partitioner {train!r}; the data set comes first: "
            "FederatedDataModule(train, partitioner)."
        )
    if isinstance(train, DataLoader):
        raise TypeError(
            "`train` must be a data set, got a DataLoader; write FederatedDataModule(loader.dataset, partitioner, "
            "batch_size=...), because each client gets batches of its own."
        )
    if isinstance(train, Mapping):
        raise TypeError(
            f"`train` must be a data set, got a {type(train).__name__} of {', '.join(map(repr, train))}; pass one of "
            f"them: FederatedDataModule(splits[{next(iter(train), 'train')!r}], partitioner)."
        )
    check_is("partitioner", partitioner, Partitioner)


def check_sizes(batch_size: Any, eval_batch_size: Any, num_workers: Any, seed: Any) -> None:
    """Check the numbers among the arguments.

    Raises:
        TypeError: If one is no integer.
        ValueError: If one is out of range.
    """
    check_is("seed", seed, int)
    least = {"batch_size": (batch_size, 1), "num_workers": (num_workers, 0)}
    if eval_batch_size is not None:
        least["eval_batch_size"] = eval_batch_size, 1
    for name, (value, smallest) in least.items():
        check_is(name, value, int)
        if value < smallest:
            raise ValueError(f"`{name}` must be at least {smallest}, got {value}.")


def check_fraction(name: str, value: Any) -> None:
    """Check that an argument is a share that leaves something.

    Raises:
        TypeError: If it is no number.
        ValueError: If it is not in ``[0, 1)``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`{name}` must be a number in [0, 1), got {value!r}.")
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1), got {value}.")
