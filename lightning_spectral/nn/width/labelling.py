"""The information about a traced forward pass that rules use, and the rules that most operations need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from lightning_spectral.nn.width.units import FIXED, Labels, Splits, Units

Axes: TypeAlias = tuple[Labels, ...]  # the labels along each dimension of a tensor
Call: TypeAlias = Mapping[str, Any]  # an operation's arguments by name


@dataclass(frozen=True, eq=False)
class Pass:
    """One traced forward pass: classes of labels, the dimension cut at each split, and the labels of its tensors."""

    units: Units
    splits: Splits
    axes: Callable[[Tensor], Axes]

    def unite(self, some: Labels, others: Labels) -> None:
        """Unite the labels of two dimensions; a dimension of size 1 is broadcast and has no effect."""
        if len(some) == len(others):
            self.units.unite(some, others)

    def fix(self, *labels: Labels) -> None:
        for those in labels:
            self.units.fix(those)


Rule: TypeAlias = Callable[[Pass, Call, Tensor], Axes]


def fixed(shape: Sequence[int]) -> Axes:
    """Labels of a tensor that is never cut."""
    return tuple(np.full(size, FIXED) for size in shape)


def elementwise(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Values at the same place belong together."""
    axes = list(fixed(out.shape))
    of_inputs = [traced.axes(value) for value in tensors_of(call)]
    for place, size in enumerate(reversed(out.shape), start=1):
        found = [own[-place] for own in of_inputs if len(own) >= place and len(own[-place]) == size]
        for labels in found[1:]:
            traced.unite(found[0], labels)
        axes[-place] = found[0] if found else axes[-place]
    return tuple(axes)


def same(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The output has the dimensions of the first argument."""
    return traced.axes(input_of(call))


def unknown(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Nothing of the inputs is cut."""
    for value in tensors_of(call):
        traced.fix(*traced.axes(value))
    return fixed(out.shape)


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors among the arguments."""
    values = [v for value in call.values() for v in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


def input_of(call: Call) -> Tensor:
    """The first tensor among the arguments."""
    return tensors_of(call)[0]


def dims_of(call: Call, ndim: int, name: str = "dim") -> list[int]:
    """The dimensions that an argument names; all dimensions if it names none."""
    given = call.get(name)
    if given is None or given == []:
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([given] if isinstance(given, int) else given)]
