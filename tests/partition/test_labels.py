"""Labels of all kinds of data sets, without reading examples where the labels are stored."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from one_by_one import OneByOne
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_spectral.partition import class_indices, dataset_labels, labels_in_examples


class Stored(Dataset[Any]):
    """Keeps its labels in an attribute; reading an example is an error."""

    def __init__(self, num_examples: int, **attributes: Any) -> None:
        self.num_examples = num_examples
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("no example should be read")


class Examples(OneByOne):
    """Has nothing but its examples."""

    def __init__(self, examples: list[Any], **attributes: Any) -> None:
        super().__init__(examples)
        vars(self).update(attributes)


TENSORS = TensorDataset(torch.randn(3, 2), torch.tensor([4, 0, 4], dtype=torch.int32))
LISTED = Examples([("x", 5), ("y", np.int64(6)), ("z", torch.tensor(7)), ("w", torch.tensor([8]))])


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Stored(3, targets=[2, 0, 1]), [2, 0, 1]),
        (Stored(3, targets=np.array([2, 0, 1], dtype=np.uint8)), [2, 0, 1]),
        (Stored(3, labels=torch.tensor([2, 0, 1])), [2, 0, 1]),
        (Stored(3, targets=None, labels=[1, 1, 0]), [1, 1, 0]),
        (TENSORS, [4, 0, 4]),
        (LISTED, [5, 6, 7, 8]),
        (Subset(Stored(3, targets=[2, 0, 1]), [2, 0]), [1, 2]),
        (Subset(Subset(TENSORS, [1, 2]), [1]), [4]),
        (Subset(LISTED, [3, 0]), [8, 5]),
        (Subset(ConcatDataset([TENSORS, LISTED]), [4, 0]), [6, 4]),
        (Subset(ConcatDataset([TENSORS, Stored(2, targets=[9, 8])]), [3, 0]), [9, 4]),
        (ConcatDataset([TENSORS, LISTED, Subset(TENSORS, [1])]), [4, 0, 4, 5, 6, 7, 8, 0]),
        (Examples([("x", 1), ("y", 0)], labels=["cat", "dog", "cow"]), [1, 0]),
        (Examples([]), []),
    ],
)
def test_labels_are_found(dataset: Dataset[Any], expected: list[int]) -> None:
    labels = dataset_labels(dataset)
    assert labels.dtype == torch.int64
    assert labels.tolist() == expected


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.randn(3, 2), torch.randn(3)),
        TensorDataset(torch.randn(3, 2), torch.ones(3, 2, dtype=torch.long)),
        Stored(2, targets=["cat", "dog"]),
        Stored(2, targets=[0.5, 1.0]),
        Examples([("x", 0.5)]),
        Examples([("x", "cat")]),
        Examples([("x", torch.tensor([1, 2]))]),
        Examples([torch.tensor([1, 2])]),
    ],
)
def test_labels_that_are_no_classes_are_refused_with_the_remedy(dataset: Dataset[Any]) -> None:
    with pytest.raises(ValueError, match=r"pass labels=\.\.\. with one class index per example"):
        dataset_labels(dataset)


class Column(Sequence[Any]):
    """Labels that are read on demand."""

    def __init__(self, labels: list[Any]) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("one after another is slow")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.labels)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ((2, 0, 1), [2, 0, 1]),
        (np.array([2, 0, 1], dtype=np.uint8), [2, 0, 1]),
        (torch.tensor([2, 0, 1], dtype=torch.int16), [2, 0, 1]),
        ([torch.tensor(2), torch.tensor(0), torch.tensor(1)], [2, 0, 1]),
        ([True, False, True], [1, 0, 1]),
        (Column([2, 0, 1]), [2, 0, 1]),
        (["b", "a", "b"], [1, 0, 1]),
        (np.array(["b", "a", "b"], dtype=object), [1, 0, 1]),
        (Column(["b", "a", "c"]), [1, 0, 2]),
    ],
)
def test_given_labels_become_class_indices(labels: Any, expected: list[int]) -> None:
    found = class_indices(labels, num_examples=3)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1], r"one class per example, shape \(3,\), got shape \(2,\)"),
        (torch.zeros(3, 1, dtype=torch.long), r"one class per example, shape \(3,\), got shape \(3, 1\)"),
        ([0.0, 1.0, 1.0], "`labels` must be one integer per example, got torch.float64"),
        (["a", None, "b"], "`labels` must be integers, got ndarray"),
        (["a", 1.5, None], "`labels` must be integers, got ndarray"),
    ],
)
def test_given_labels_that_are_no_classes_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        class_indices(labels, num_examples=3)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([("x", 0)])


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Examples([{"x": 1, "label": 0}]), r"got dict; pass .*, e\.g\. the column: labels=train\['label'\]\."),
        (Stream(), "Stream has no length"),
    ],
)
def test_data_sets_without_labels_are_refused_with_the_remedy(dataset: Dataset[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataset_labels(dataset)


def shifted(**attributes: Any) -> Stored:
    return Stored(3, targets=[1, 26, 1], target_transform=lambda letter: letter - 1, **attributes)


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (shifted(), [0, 25, 0]),
        (Subset(shifted(), [1, 0]), [25, 0]),
        (ConcatDataset([TENSORS, shifted(), Subset(shifted(), [1])]), [4, 0, 4, 0, 25, 0, 25]),
        (Stored(3, targets=[1, 26, 1], target_transform=None), [1, 26, 1]),
        (Stored(2, targets=[1, 2], target_transform=lambda letter: torch.tensor([0.0, 1.0])), [1, 2]),  # one-hot
        (Stored(2, targets=[1, 2], target_transform=str), [1, 2]),
        (Examples([("x", 1), ("y", 0)], target_transform=lambda label: label + 5), [1, 0]),  # read: already applied
        (TENSORS, [4, 0, 4]),
    ],
)
def test_stored_labels_are_transformed_as_those_in_examples_are(dataset: Dataset[Any], expected: list[int]) -> None:
    labels = labels_in_examples(dataset, dataset_labels(dataset))
    assert labels.dtype == torch.int64
    assert labels.tolist() == expected
