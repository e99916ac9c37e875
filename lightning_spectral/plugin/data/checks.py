"""Checks of the arguments of a data module, whose errors say what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_spectral.errors import check_is
from lightning_spectral.partition import Partitioner


def check_dealt(train: Any, partitioner: Any) -> None:
    """Raise ``TypeError`` unless there is a map-style data set, and a partitioner that deals it to clients."""
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
    _check_no_columns("train", train)
    if isinstance(train, IterableDataset):
        raise TypeError(
            f"`train` must be a map-style data set, whose examples have numbers, got {type(train).__name__}, which "
            "cannot be dealt to clients; collect its examples first, for example in a list."
        )
    if isinstance(train, str | bytes | type) or not hasattr(train, "__getitem__"):
        raise TypeError(
            f"`train` must be a map-style data set, with `__len__` and `__getitem__`, got {train!r}; pass the data "
            "set itself, or a list of examples."
        )
    check_is("partitioner", partitioner, Partitioner)


def check_evaluation(**data: Any) -> None:
    """Raise ``TypeError`` if evaluation data come in a dictionary or as tensors, or cannot be iterated over."""
    for name, value in data.items():
        if isinstance(value, Mapping):
            raise TypeError(
                f"`{name}` must be a data set, a dataloader or a list of them, got a {type(value).__name__}; write "
                f"{name}=list(data.values()), and Lightning numbers their metrics in this order."
            )
        _check_no_columns(name, value)
        can_be_read = hasattr(value, "__getitem__") or hasattr(value, "__iter__")
        if value is not None and (isinstance(value, str | bytes | type) or not can_be_read):
            raise TypeError(f"`{name}` must be a data set, a dataloader or a list of them, got {value!r}.")


def check_collate(collate_fn: Any) -> None:
    """Raise ``TypeError`` unless ``collate_fn`` is a function, or ``None``."""
    if collate_fn is not None and not callable(collate_fn):
        raise TypeError(f"`collate_fn` must be a function from a list of examples to a batch, got {collate_fn!r}.")


def _check_no_columns(argument: str, data: Any) -> None:
    """Raise ``TypeError`` for inputs and labels that have not been combined into examples."""
    if isinstance(data, tuple) and data and all(isinstance(part, Tensor) for part in data):
        raise TypeError(
            f"`{argument}` must be a data set, got a tuple of tensors; write "
            f"torch.utils.data.TensorDataset(*{argument}), whose examples are the tensors' rows."
        )


def are_several(data: Any) -> TypeGuard[Sequence[Any]]:
    """Whether evaluation data are a list of data sets or loaders; a list of examples is one data set.

    Example:
        >>> loader, example = DataLoader([1, 2]), ([0.5, 0.1], 1)
        >>> are_several([loader, loader]), are_several([example, example])
        (True, False)
    """
    return isinstance(data, list | tuple) and not any(isinstance(one, tuple | Mapping | Tensor) for one in data)


def check_asked(trainer: pl.Trainer | None, method: str, argument: str, data: Any) -> None:
    """Raise ``ValueError`` if a method of the Trainer is to evaluate on data that are missing."""
    if data is None and trainer is not None and trainer.state.fn == method:
        raise ValueError(
            f"`Trainer.{method}` needs data; give FederatedDataModule(..., {argument}=...), or a dataloader."
        )


def dataset_length(dataset: Any) -> int:
    """The number of examples of a data set; raise ``ValueError`` if it has no length."""
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"{type(dataset).__name__} has no length, so its examples cannot be dealt to clients; "
            "pass a map-style data set, with `__len__` and `__getitem__`."
        )
    return len(dataset)
