"""Which data sets can be dealt to clients or evaluated on, and one whose examples differ by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_spectral.errors import check_is
from lightning_spectral.partition.partition import Partition, Partitioner


def check_dealt(train: Any, partitioner: Any) -> None:
    """Raise ``TypeError`` unless there is a map-style data set, and a partitioner that deals it to clients."""
    kind = type(train).__name__
    _check_no_columns("train", train)
    if isinstance(train, Partitioner):
        said = f"data set, got the partitioner {train!r}; the data set comes first: FederatedDataModule(train, ...)"
    elif isinstance(train, DataLoader):
        said = (
            "data set, got a DataLoader; write FederatedDataModule(loader.dataset, partitioner, batch_size=..., "
            "collate_fn=loader.collate_fn), because each client gets batches of its own, in an order of its own: the "
            "loader's sampler is not used"
        )
    elif hasattr(train, "iloc"):
        said = f"data set, got a {kind}; write TensorDataset(torch.tensor(frame[columns].to_numpy()), labels)"
    elif isinstance(train, Mapping):
        said = (
            f"data set, got a {kind} of {', '.join(map(repr, train))}; pass one of them: "
            f"FederatedDataModule(splits[{next(iter(train), 'train')!r}], partitioner)"
        )
    elif isinstance(train, IterableDataset):
        said = (
            f"map-style data set, whose examples have numbers, got {kind}, which cannot be dealt to clients; collect "
            "its examples first, for example in a list"
        )
    elif isinstance(train, str | bytes | type) or not (hasattr(train, "__getitem__") and hasattr(train, "__len__")):
        said = (
            f"map-style data set, with `__len__` and `__getitem__`, got {train!r}; pass the data set itself, or a list "
            "of examples"
        )
    else:
        check_is("partitioner", partitioner, Partitioner)
        return
    raise TypeError(f"`train` must be a {said}.")


def check_client_transform(transform: Any) -> None:
    """Raise ``TypeError`` unless it is ``None`` or takes an example and the number of its client."""
    try:
        if transform is not None:
            signature(transform).bind(None, 0)
    except (TypeError, ValueError) as error:  # the latter of a function in C
        rule = "`client_transform` must be a function of an example and the number of its client"
        raise TypeError(f"{rule}, got {transform!r}; write lambda example, client: ...") from error


class TransformedByClient(Dataset[Any]):
    """A data set as its clients see it: each example after a function of it and of the client that has it."""

    def __init__(self, dataset: Any, transform: Callable[[Any, int], Any], parts: Sequence[Partition]) -> None:
        self.dataset, self.transform = dataset, transform
        self.client_of_example = torch.full((len(dataset),), -1)
        for part in parts:
            self.client_of_example[part.indices] = torch.arange(len(part)).repeat_interleave(part.sizes)

    def __len__(self) -> int:
        return len(self.client_of_example)

    def __getitem__(self, index: int) -> Any:
        client = int(self.client_of_example[index])
        return self.dataset[index] if client < 0 else self.transform(self.dataset[index], client)


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


def _check_no_columns(argument: str, data: Any) -> None:
    """Raise ``TypeError`` for inputs and labels that have not been combined into examples.

    A tuple of arrays is taken for these, and a list of arrays that have one length, but not one number of dimensions.
    """
    if not isinstance(data, tuple | list) or not data or not all(isinstance(one, Tensor | np.ndarray) for one in data):
        return
    lengths, dims = {tuple(one.shape[:1]) for one in data}, {one.ndim for one in data}
    if isinstance(data, tuple) or (len(lengths) == 1 and len(dims) > 1):
        parts = argument if isinstance(data[0], Tensor) else f"map(torch.from_numpy, {argument})"
        raise TypeError(
            f"`{argument}` must be a data set, got a {type(data).__name__} of {type(data[0]).__name__}s; write "
            f"torch.utils.data.TensorDataset(*{parts}), whose examples are their rows."
        )
