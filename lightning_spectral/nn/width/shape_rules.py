"""What a rule for channels is, and the rules for operations that move, join, cut and reduce dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.nn.width.units import FIXED, Labels, Splits, Units, reshaped

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


def reduce(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Dimensions that are reduced disappear."""
    if "other" in call:  # the larger of two tensors
        return elementwise(traced, call, out)
    axes = traced.axes(input_of(call))
    gone = dims_of(call, len(axes))
    if call.get("keepdim"):
        return tuple(fixed([1])[0] if dim in gone else labels for dim, labels in enumerate(axes))
    return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)


def view(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Several dimensions become one, or one becomes several: see `reshaped`."""
    return reshaped(traced.units, traced.splits, traced.axes(input_of(call)), out.shape)


def permute(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The dimensions in another order."""
    axes = traced.axes(input_of(call))
    return tuple(axes[dim] for dim in dims_of(call, len(axes), "dims"))


def transpose(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Two dimensions change places."""
    axes = list(traced.axes(input_of(call)))
    one, two = (call.get(name, default) % max(len(axes), 1) for name, default in (("dim0", 0), ("dim1", -1)))
    if axes:
        axes[one], axes[two] = axes[two], axes[one]
    return tuple(axes)


def unsqueeze(traced: Pass, call: Call, out: Tensor) -> Axes:
    """A dimension of size 1 is added."""
    axes = list(traced.axes(input_of(call)))
    axes.insert(call["dim"] % out.ndim, fixed([1])[0])
    return tuple(axes)


def squeeze(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Dimensions of size 1 disappear."""
    axes = traced.axes(input_of(call))
    gone = [dim for dim in dims_of(call, len(axes)) if len(axes[dim]) == 1]
    return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)


def expand(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Added and widened dimensions have no channels."""
    axes = traced.axes(input_of(call))
    added = out.ndim - len(axes)
    kept = [
        labels if len(labels) == size else fixed([size])[0]
        for labels, size in zip(axes, out.shape[added:], strict=True)
    ]
    return (*fixed(out.shape[:added]), *kept)


def select(traced: Pass, call: Call, out: Tensor) -> Axes:
    """One place of a dimension is read, and the dimension disappears."""
    axes = traced.axes(input_of(call))
    dim = call["dim"] % len(axes)
    return axes[:dim] + axes[dim + 1 :]


def along(traced: Pass, call: Call, dim: int, labels: Labels) -> Axes:
    """The first argument's dimensions, with other labels along one of them."""
    axes = list(traced.axes(input_of(call)))
    axes[dim] = labels
    return tuple(axes)


def sliced(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Some places of a dimension."""
    axes = traced.axes(input_of(call))
    dim = call.get("dim", 0) % len(axes)
    return along(traced, call, dim, axes[dim][call.get("start") : call.get("end") : call.get("step", 1)])


def flip(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Some dimensions in reverse."""
    axes = traced.axes(input_of(call))
    return tuple(labels[::-1] if dim in dims_of(call, len(axes), "dims") else labels for dim, labels in enumerate(axes))


def cat(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Along one dimension, each piece keeps its own channels; along the others, those of all pieces belong together."""
    pieces = [axes for axes in map(traced.axes, call["tensors"]) if len(axes) == out.ndim]  # not torch's empty ones
    dim = call.get("dim", 0) % out.ndim
    for axes in pieces[1:]:
        for place in range(out.ndim):
            if place != dim:
                traced.unite(pieces[0][place], axes[place])
    return (*pieces[0][:dim], np.concatenate([axes[dim] for axes in pieces]), *pieces[0][dim + 1 :])


def stack(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The same places of all pieces belong together; the new dimension has no channels."""
    axes = list(elementwise(traced, call, call["tensors"][0]))
    axes.insert(call.get("dim", 0) % out.ndim, fixed([len(call["tensors"])])[0])
    return tuple(axes)


def repeat(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The same channels, repeated."""
    axes = traced.axes(input_of(call))
    axes = (*fixed([1] * (out.ndim - len(axes))), *axes)
    return tuple(np.tile(labels, times) for labels, times in zip(axes, call["repeats"], strict=True))


def pad(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Padding adds no channels."""
    axes = list(traced.axes(input_of(call)))
    pairs = zip(call["pad"][::2], call["pad"][1::2], strict=True)
    for place, (before, after) in enumerate(pairs, start=1):
        cut = axes[-place][max(-before, 0) : len(axes[-place]) - max(-after, 0)]
        axes[-place] = np.pad(cut, (max(before, 0), max(after, 0)), constant_values=FIXED)
    return tuple(axes)


def index(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Indexed dimensions are not cut."""
    axes, indices = traced.axes(call["self"]), call["indices"]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    traced.fix(*(axes[dim] for dim in places))
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices if index is not None):
        return unknown(traced, call, out)
    kept = [dim for dim in range(len(axes)) if dim not in places]
    new = out.ndim - len(kept)
    neighbours = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if neighbours else 0
    return tuple([axes[d] for d in kept[:at]] + list(fixed(out.shape[at : at + new])) + [axes[d] for d in kept[at:]])


def ordered(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The order or the number of values along a dimension matters, so it is not cut."""
    axes = traced.axes(input_of(call))
    traced.fix(*(axes[dim] for dim in dims_of(call, len(axes))))
    return axes
