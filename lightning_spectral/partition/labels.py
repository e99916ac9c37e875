"""The labels of a data set, read without the examples where possible."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from lightning_spectral.partition.partition import check_one_per_example

Labels = Tensor | Sequence[int | str] | npt.NDArray[np.generic]

STORED = ("targets", "labels")  # attributes of a data set
SAMPLED = 16  # examples that are compared with the stored labels
_REMEDY = "pass labels=... with one class index per example."


def dataset_labels(dataset: Dataset[Any]) -> Tensor:
    """Class index of each example of a map-style data set.

    Looks, in this order, for an attribute ``targets`` or ``labels`` with one entry per example, for the last
    tensor of a :class:`~torch.utils.data.TensorDataset`, and inside :class:`~torch.utils.data.Subset` and
    :class:`~torch.utils.data.ConcatDataset`. Otherwise it reads every example once and takes its last element,
    which runs the data set's transforms and may draw from the global generators.

    Returns:
        Labels, int64, shape ``(len(dataset),)``. Stored labels are those before any ``target_transform``.

    Example:
        >>> data = TensorDataset(torch.randn(3, 2), torch.tensor([1, 0, 1]))
        >>> dataset_labels(Subset(data, [2, 1]))
        tensor([1, 0])
    """
    if not hasattr(dataset, "__len__"):
        raise ValueError(f"{type(dataset).__name__} has no length, so its labels cannot be listed; {_REMEDY}")
    stored = stored_labels(dataset)
    if stored is None and isinstance(dataset, ConcatDataset):
        return torch.cat([dataset_labels(part) for part in dataset.datasets])
    return _read(dataset) if stored is None else stored


def labels_in_examples(dataset: Dataset[Any], labels: Tensor) -> Tensor:
    """What `dataset_labels` found, after the ``target_transform`` that the data set applies to what it stores.

    The transform is called once for each class. Labels that do not become one integer, such as one-hot vectors, stay.

    Example:
        >>> class Letters(list):  # as torchvision has them
        ...     targets, target_transform = [1, 26, 2], staticmethod(lambda letter: letter - 1)
        >>> letters = Letters("aba")
        >>> dataset_labels(letters), labels_in_examples(letters, dataset_labels(letters))
        (tensor([ 1, 26,  2]), tensor([ 0, 25,  1]))
    """
    if isinstance(dataset, Subset):
        return labels_in_examples(dataset.dataset, labels)
    if isinstance(dataset, ConcatDataset):
        parts = torch.split(labels, [len(part) for part in dataset.datasets])  # type: ignore[arg-type]
        return torch.cat([labels_in_examples(*pair) for pair in zip(dataset.datasets, parts, strict=True)])
    transform = getattr(dataset, "target_transform", None)
    if transform is None or isinstance(dataset, TensorDataset) or stored_labels(dataset) is None:
        return labels
    classes, which = torch.unique(labels, return_inverse=True)
    try:
        return _as_classes([transform(label) for label in classes.tolist()], "a transformed label")[which]
    except (TypeError, ValueError):
        return labels


def check_labels_of_examples(dataset: Dataset[Any], labels: Tensor) -> None:
    """Check labels that a data set stores against a sample of its examples, spread evenly over it.

    An example agrees if its stored label, perhaps transformed, is among its parts, or if it has no integer.

    Raises:
        ValueError: If an example has integers, but not its label: someone has permuted or relabelled one of the two.

    Example:
        >>> class Reversed(list):
        ...     targets = [0, 1, 2]
        >>> check_labels_of_examples(Reversed([("a", 2), ("b", 1), ("c", 0)]), torch.tensor([0, 1, 2]))
        Traceback (most recent call last):
        ValueError: Example 0 of Reversed has the label 2, but its `targets` or `labels` say 0, ...
    """
    if isinstance(dataset, TensorDataset):
        return
    expected, size = labels_in_examples(dataset, labels), len(dataset)  # type: ignore[arg-type]
    for index in sorted({round(i * (size - 1) / (SAMPLED - 1)) for i in range(SAMPLED)} if size else ()):
        example = dataset[index]
        parts = example[1:] if isinstance(example, tuple | list) else ()
        values = [torch.as_tensor(part) for part in parts if isinstance(part, Tensor | np.ndarray | np.generic | int)]
        found = [int(one) for one in values if one.numel() == 1 and not (one.is_floating_point() or one.is_complex())]
        if found and not {int(labels[index]), int(expected[index])} & set(found):
            raise ValueError(
                f"Example {index} of {type(dataset).__name__} has the label {', '.join(map(str, found))}, but its "
                f"`targets` or `labels` say {int(labels[index])}, so clients would not get the classes that the "
                f"partitioner deals. Permute or relabel both (`torch.utils.data.Subset` does), or {_REMEDY}"
            )


def class_indices(labels: Labels, num_examples: int) -> Tensor:
    """Class index of each example, from labels that a user gives.

    Args:
        labels: Integers, or class names, which are numbered in sorted order: a tensor, an array, a list, or a
            column of a table, shape ``(num_examples,)``.
        num_examples: Length of the data set.

    Returns:
        Class indices, int64, shape ``(num_examples,)``, on the CPU.

    Example:
        >>> class_indices(["dog", "cat", "dog"], num_examples=3)
        tensor([1, 0, 1])
    """
    check_one_per_example("labels", labels)
    if not isinstance(labels, Tensor):
        is_lazy = hasattr(labels, "__iter__") and not hasattr(labels, "__array__")  # a column: slow to index
        labels = np.asarray(list(labels) if is_lazy else labels)
        if labels.dtype.kind == "U" or (labels.dtype == object and all(isinstance(label, str) for label in labels)):
            labels = np.unique(labels, return_inverse=True)[1]
    if (shape := tuple(labels.shape)) != (num_examples,):
        raise ValueError(f"`labels` must hold one class per example, shape ({num_examples},), got shape {shape}.")
    return _as_classes(labels, "`labels`")


def by_class(labels: Tensor, generator: torch.Generator) -> Tensor:
    """Indices of the examples in the order of their labels, of equal ones in random order."""
    shuffled = torch.randperm(len(labels), generator=generator)
    return shuffled[labels.cpu()[shuffled].argsort(stable=True)]


def stored_labels(dataset: Any) -> Tensor | None:
    """Labels that a data set stores as a whole, or ``None``; raise ``ValueError`` unless they are integers."""
    for name in STORED:
        values: Any = getattr(dataset, name, None)
        # in some data sets `labels` is the list of class names, which has another length
        if hasattr(values, "__len__") and len(values) == len(dataset):
            return _as_classes(values, f"`{type(dataset).__name__}.{name}`")
    if isinstance(dataset, TensorDataset):
        return _as_classes(dataset.tensors[-1], "The last tensor of the TensorDataset")
    if isinstance(dataset, Subset):
        whole = stored_labels(dataset.dataset)
        return None if whole is None else whole[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [part for part in map(stored_labels, dataset.datasets) if part is not None]
        return torch.cat(parts) if len(parts) == len(dataset.datasets) else None
    return None


def _read(dataset: Any) -> Tensor:
    labels = []
    for index, example in enumerate(dataset[index] for index in range(len(dataset))):
        if not isinstance(example, tuple | list) or len(example) < 2:
            column = ", e.g. the column: labels=train['label']" if isinstance(example, Mapping) else ""
            raise ValueError(
                f"Examples of {type(dataset).__name__} must be tuples that end in a label, got "
                f"{type(example).__name__}; {_REMEDY.rstrip('.')}{column}."
            )
        labels.append(_as_classes(example[-1], f"The label of example {index}").reshape(-1))
        if labels[-1].numel() != 1:
            raise ValueError(f"Example {index} must have one label, got {labels[-1].numel()}; {_REMEDY}")
    return torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)


def _as_classes(values: Any, owner: str) -> Tensor:
    """Convert ``values`` to int64; raise unless they are integers of at most one dimension."""
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{owner} must be integers, got {type(values).__name__}; {_REMEDY}") from error
    kind, shape = labels.dtype, tuple(labels.shape)
    if kind.is_floating_point or kind.is_complex or len(shape) > 1:
        raise ValueError(f"{owner} must be one integer per example, got {kind} of shape {shape}; {_REMEDY}")
    return labels.cpu().long()
