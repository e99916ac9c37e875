"""Rules for the channels in operations that move, join, cut and reduce dimensions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.nn.width.labelling import (
    Axes,
    Call,
    Pass,
    dims_of,
    elementwise,
    fixed,
    input_of,
    unknown,
)
from lightning_spectral.nn.width.units import FIXED, Labels, reshaped


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
