"""Classes of channels that a network keeps or loses together, also where dimensions are merged and split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Labels: TypeAlias = npt.NDArray[np.int64]
Key: TypeAlias = tuple[int, int]
FIXED = 0  # the label of entries that are never cut


class Units:
    """Labels, each with the class that it belongs to; classes can be united with each other or with `FIXED`.

    Example:
        >>> units = Units()
        >>> out, into = units.fresh(3), units.fresh(3)
        >>> units.unite(out, into[[0, 1, 1]])
        >>> units.find(out), units.find(into)
        (array([1, 2, 2]), array([1, 2, 6]))
    """

    def __init__(self) -> None:
        self._parent = np.zeros(1, dtype=np.int64)
        self._is_united = False  # until then, each label is its own class, as nearly always in a trial

    @property
    def size(self) -> int:
        return len(self._parent)

    @property
    def united(self) -> Labels:
        return np.flatnonzero(self._parent != np.arange(self.size))

    def fresh(self, count: int) -> Labels:
        """New labels, each in a class of its own."""
        labels = np.arange(len(self._parent), len(self._parent) + count)
        self._parent = np.concatenate([self._parent, labels])
        return labels

    def own_labels(self, shape: Sequence[int], known: Sequence[Labels] | None = None) -> tuple[Labels, ...]:
        """The labels of a tensor's dimensions: the known ones, or new ones except for dimensions of size 1."""
        if known is None:
            return tuple(self.fresh(size) if size > 1 else np.full(size, FIXED) for size in shape)
        most = max((int(labels.max(initial=0)) for labels in known), default=0)
        self.fresh(max(0, most + 1 - len(self._parent)))
        return tuple(known)

    def find(self, labels: Labels) -> Labels:
        """The smallest label in the class of each label."""
        while self._is_united and not bool(((above := self._parent[labels]) == labels).all()):
            labels = above
        return labels

    def agree(self, some: Labels, others: Labels) -> bool:
        """Whether labels at the same places have the same class; arrays broadcast."""
        return bool((self.find(some) == self.find(others)).all())

    def unite(self, some: Labels, others: Labels) -> None:
        """Unite the classes of labels at the same places; arrays broadcast."""
        some, others = self.find(some), self.find(others)
        if bool((some == others).all()):  # as nearly always in a trial
            return
        pairs = np.stack(np.broadcast_arrays(some, others)).reshape(2, -1)
        for one, two in np.unique(pairs[:, pairs[0] != pairs[1]], axis=1).T:
            least, largest = sorted(self.find(np.array([one, two])).tolist())
            if least != largest:
                self._parent[largest] = least
                self._is_united = True

    def fix(self, labels: Labels) -> None:
        self.unite(labels, np.array(FIXED))


@dataclass
class Splits:
    """The choices of which dimension is cut, wherever a dimension of channels is split into several.

    Suppose that a linear layer's ``heads * size`` outputs become ``(heads, size)``. Then either the same places can be
    cut from each head, or whole heads. Either choice unites the channels that are cut together; the one that leaves
    more units is tried first. A split's key is the number of the reshaped tensor in the pass, and the first of the new
    dimensions.
    """

    chosen: Mapping[Key, int] = field(default_factory=dict)  # dimensions given beforehand
    taken: dict[Key, int] = field(default_factory=dict)  # the dimension of every split of the pass
    rivals: dict[Key, tuple[int, ...]] = field(default_factory=dict)  # where there is a choice, in order of preference
    labels: dict[Key, Labels] = field(default_factory=dict)  # that each split divides
    count: int = 0


def reshaped(units: Units, splits: Splits, axes: Sequence[Labels], shape: Sequence[int]) -> tuple[Labels, ...]:
    """The labels of each dimension of a reshaped tensor; choices made here are added to ``splits``."""
    new: list[Labels] = []
    number, splits.count = splits.count, splits.count + 1
    for before, after in _segments([len(labels) for labels in axes], shape):
        merged = _merged(units, [axes[i] for i in before]).reshape([shape[i] for i in after])
        new += _split(units, splits, merged, (number, len(new)))
    return tuple(new)


def _segments(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of neighbouring dimensions, as short as possible, that hold the same values before and after."""
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = [i][: len(before) - i], [j][: len(after) - j]
        i, j = i + len(old), j + len(new)
        while (size := math.prod(before[k] for k in old)) != (other := math.prod(after[k] for k in new)):
            if size < other:
                old.append(i)
                i += 1
            else:
                new.append(j)
                j += 1
        if i == len(before) or j == len(after):  # what is left has size 1
            old, new = [*old, *range(i, len(before))], [*new, *range(j, len(after))]
            i, j = len(before), len(after)
        yield old, new


def _merged(units: Units, axes: Sequence[Labels]) -> Labels:
    """The labels of all values of some dimensions; where two dimensions have labels, neither is cut."""
    found = [units.find(labels) for labels in axes]
    if sum(bool(labels.any()) for labels in found) > 1:
        for labels in found:
            units.fix(labels)
        found = [np.full_like(labels, FIXED) for labels in found]
    merged = np.zeros([len(labels) for labels in found], dtype=np.int64)
    for dim, labels in enumerate(found):
        merged += labels.reshape([-1 if i == dim else 1 for i in range(len(found))])
    return merged


def _split(units: Units, splits: Splits, merged: Labels, key: Key) -> list[Labels]:
    """The labels of each new dimension: for one of them, those of its slices; for the others, none."""
    new = [np.full(size, FIXED) for size in merged.shape]
    if not merged.any():
        return new
    by_dim = [np.moveaxis(merged, dim, 0).reshape(size, -1) for dim, size in enumerate(merged.shape)]
    free = [dim for dim, slices in enumerate(by_dim) if (slices == slices[:, :1]).all()]
    if key in splits.chosen:
        dim = splits.chosen[key]
    elif free:  # its slices have one label each
        dim = max(free, key=lambda dim: len(by_dim[dim]))
    else:
        num_units = [len(np.unique(slices.min(1))) for slices in by_dim]
        ranked = sorted(range(len(by_dim)), key=lambda dim: (num_units[dim], dim), reverse=True)
        splits.rivals[key], dim = tuple(ranked), ranked[0]
    splits.taken[key], splits.labels[key] = dim, merged.reshape(-1)
    units.unite(by_dim[dim], by_dim[dim][:, :1])
    new[dim] = by_dim[dim][:, 0]
    return new
