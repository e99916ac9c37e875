"""Classes of channels that a network keeps or loses together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Labels: TypeAlias = npt.NDArray[np.int64]
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
        """Number of labels."""
        return len(self._parent)

    @property
    def united(self) -> Labels:
        """The labels that are in the class of a smaller one."""
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
        """Never cut entries with these labels."""
        self.unite(labels, np.array(FIXED))
