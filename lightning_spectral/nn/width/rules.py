"""Channels as labels in classes that are kept or lost together, and what each of torch's operations does with them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Labels: TypeAlias = npt.NDArray[np.int64]
Key: TypeAlias = tuple[int, int]
FIXED = 0  # the label of entries that are never cut


@dataclass(eq=False)
class Units:
    """Labels, each with the class that it belongs to; classes can be united with each other or with `FIXED`.

    Example:
        >>> units = Units()
        >>> out, into = units.fresh(3), units.fresh(3)
        >>> units.unite(out, into[[0, 1, 1]])
        >>> units.find(out), units.find(into)
        (array([1, 2, 2]), array([1, 2, 6]))
    """

    _parent: Labels = field(default_factory=lambda: np.zeros(1, dtype=np.int64), init=False)
    _is_united: bool = field(default=False, init=False)  # until then each label is its own class, as mostly in a trial

    @property
    def united(self) -> Labels:
        return np.flatnonzero(self._parent != np.arange(len(self._parent)))

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


Axes: TypeAlias = tuple[Labels, ...]  # the labels along each dimension of a tensor
Call: TypeAlias = Mapping[str, Any]  # an operation's arguments by name

# Operations by their bare names. The labels of these are those of their first tensor.
SAME = {
    *("clone", "detach", "alias", "_to_copy", "copy", "contiguous", "lift_fresh", "native_dropout", "fill_", "zero_"),
    *("_softmax", "_log_softmax", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("bernoulli", "bernoulli_"),
}
ELEMENTWISE = {"copy_", "_prelu_kernel", "where", "masked_fill", "masked_fill_"}  # beside those that torch knows
REDUCED = {
    *("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"),
    *("linalg_vector_norm", "logsumexp", "norm"),
}
VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"}
SPLIT = {"split", "split_with_sizes", "chunk"}
LAYER_NORMS = {"native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"}
NORMS = {
    *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_batch_norm_with_update", "_batch_norm_no_update"),
    *("_batch_norm_impl_index", "native_group_norm", *LAYER_NORMS),
}
SPATIAL = (  # how they begin
    *("max_pool", "avg_pool", "adaptive_", "_adaptive_", "fractional_max_pool", "mkldnn_max_pool", "mkldnn_adaptive_"),
    *("upsample_", "_upsample_", "reflection_pad", "replication_pad"),
)


def fixed(shape: Sequence[int]) -> Axes:
    """Labels of a tensor that is never cut."""
    return tuple(np.full(size, FIXED) for size in shape)


@dataclass(eq=False)
class Pass:
    """What a forward pass shows about the channels of a module; what it showed so far, if it failed."""

    splits: Splits
    units: Units = field(default_factory=Units)
    named: Mapping[str, Axes] = field(default_factory=dict)  # of each parameter and buffer
    unknown: set[str] = field(default_factory=set)  # operations without a rule
    made: list[Axes] = field(default_factory=list)  # the labels of each tensor that the pass made, in order
    _axes: dict[int, Axes] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # so that no two tensors of the pass have the same id

    def axes(self, tensor: Tensor) -> Axes:
        """The labels of a tensor; those of one that is never cut if it has got none."""
        return self._axes[id(tensor)] if id(tensor) in self._axes else fixed(tensor.shape)

    def put(self, tensor: Tensor, axes: Axes) -> None:
        self._axes[id(tensor)] = axes
        self._alive.append(tensor)

    def unite(self, some: Labels, others: Labels) -> None:
        """Unite the labels of two dimensions; a dimension of size 1 is broadcast and has no effect."""
        if len(some) == len(others):
            self.units.unite(some, others)

    def fix(self, *labels: Labels) -> None:
        for those in labels:
            self.units.fix(those)


def tensors_of(call: Call) -> list[Tensor]:
    """The tensors among the arguments."""
    values = [v for value in call.values() for v in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


def is_depthwise(groups: int, in_channels: int) -> bool:
    """Whether each input channel is a group of its own, so that it can go with its outputs."""
    return groups == in_channels


def loses_groups(num_groups: int, num_channels: int) -> bool:
    """Whether whole groups of a GroupNorm are cut, or else the same channels of each: whichever is finer."""
    return num_groups > 1 and num_groups * num_groups >= num_channels


def pieces(name: str, call: Call, outs: Sequence[Tensor]) -> list[Call]:
    """The arguments that determine each output: for the pieces of a split tensor, those of slices."""
    if name == "unbind":
        return [{"dim": 0, **call}] * len(outs)
    if name not in SPLIT:
        return [call] * len(outs)
    ends = np.cumsum([out.shape[call.get("dim", 0)] for out in outs]).tolist()
    return [{**call, "start": start, "end": end} for start, end in zip([0, *ends[:-1]], ends, strict=True)]


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


def unknown(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Nothing of the inputs is cut."""
    for value in tensors_of(call):
        traced.fix(*traced.axes(value))
    return fixed(out.shape)


def convolution(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Channels of a depthwise convolution go with its inputs; each group of a grouped one loses the same channels."""
    x, weight, groups = traced.axes(call["input"]), traced.axes(call["weight"]), call["groups"]
    traced.fix(*weight[2:])
    into, (first, second) = x[1], weight[:2]
    own_out, own_in = (second, first) if call["transposed"] else (first, second)
    outs = np.tile(own_out, groups) if call["transposed"] else own_out
    goes_with_input = not traced.units.find(own_in).any() and (groups > 1 or traced.units.find(into).any())
    if is_depthwise(groups, len(into)) and goes_with_input:
        traced.units.unite(outs.reshape(groups, -1), into[:, None])
    else:  # each group of channels loses the same ones
        traced.units.unite(into.reshape(groups, -1), own_in if not call["transposed"] else own_in.reshape(groups, -1))
        traced.units.unite(outs.reshape(groups, -1), outs.reshape(groups, -1)[:1])
        if call["transposed"] and groups > 1:
            traced.units.unite(into.reshape(groups, -1), into.reshape(groups, -1)[:1])
    if call.get("bias") is not None:
        traced.unite(traced.axes(call["bias"])[0], outs)
    return (x[0], outs, *fixed(out.shape[2:]))


def attention(traced: Pass, call: Call) -> Axes:
    """Queries meet keys, and weights meet values."""
    query, key, value = (traced.axes(call[name]) for name in ("query", "key", "value"))
    for one, two in ((query[-1], key[-1]), (key[-2], value[-2])):
        traced.unite(one, two)
    for place in range(len(query) - 2):
        traced.unite(query[place], key[place])
        traced.unite(key[place], value[place])
    return (*query[:-1], value[-1])


def product(traced: Pass, call: Call) -> Axes:
    """A product of matrices, of batches of them, or of a matrix and a vector, possibly with a bias."""
    tensors = tensors_of(call)
    bias, (left, right) = tensors[:-2], map(traced.axes, tensors[-2:])
    traced.unite(left[-1], right[-2] if len(right) > 1 else right[-1])
    for one, two in zip(left[:-2], right[:-2], strict=True):
        traced.unite(one, two)
    axes = (*left[:-1], *(right[-1:] if len(right) > 1 else ()))
    for own in map(traced.axes, bias):
        for labels, others in zip(reversed(own), reversed(axes), strict=False):
            traced.unite(labels, others)
    return axes


def indexed(traced: Pass, call: Call, out: Tensor) -> Axes:
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


def normalised(traced: Pass, name: str, call: Call) -> Axes:
    """Each channel, or each place of a layer norm, has a scale, a shift and perhaps statistics."""
    axes, others = traced.axes(call["input"]), list(map(traced.axes, tensors_of(call)[1:]))
    if name in LAYER_NORMS:
        for own in others:
            for labels, of_scale in zip(reversed(axes), reversed(own), strict=False):
                traced.unite(labels, of_scale)
        return axes
    if name == "native_group_norm":  # whole groups, or the same channels of each; a sub-model keeps the whole's choice
        by_group = axes[1].reshape(call["group"], -1)
        groups_go, channels_go = by_group[:, :1], by_group[:1]
        if not (traced.units.agree(by_group, groups_go) or traced.units.agree(by_group, channels_go)):
            traced.units.unite(by_group, groups_go if loses_groups(call["group"], call["C"]) else channels_go)
    for own in others:
        traced.unite(own[0], axes[1])
    return axes


def labels_of(traced: Pass, name: str, is_pointwise: bool, call: Call, out: Tensor) -> Axes | None:
    """The labels of an operation's output, by the bare name of the operation; ``None`` if no rule is known for it."""
    if name == "convolution":
        return convolution(traced, call, out)
    if name in PRODUCTS:
        return product(traced, call)
    if "scaled_dot_product" in name:
        return attention(traced, call)
    if name in NORMS:
        return normalised(traced, name, call)
    if name == "embedding":  # rows are looked up by number, so they are not cut
        rows, columns = traced.axes(call["weight"])
        traced.fix(rows)
        return (*fixed(out.shape[:-1]), columns)
    if name == "index":
        return indexed(traced, call, out)
    if name == "cat":  # each piece keeps its channels along one dimension; elsewhere those of all belong together
        parts = [axes for axes in map(traced.axes, call["tensors"]) if len(axes) == out.ndim]  # not torch's empty ones
        dim = call.get("dim", 0) % out.ndim
        for axes in parts[1:]:
            for place in range(out.ndim):
                if place != dim:
                    traced.unite(parts[0][place], axes[place])
        return (*parts[0][:dim], np.concatenate([axes[dim] for axes in parts]), *parts[0][dim + 1 :])
    if name == "stack":  # the same places of all pieces belong together; the new dimension has no channels
        new = list(elementwise(traced, call, call["tensors"][0]))
        new.insert(call.get("dim", 0) % out.ndim, fixed([len(call["tensors"])])[0])
        return tuple(new)
    if name in ELEMENTWISE or (name in REDUCED and "other" in call):  # the larger of two tensors
        return elementwise(traced, call, out)
    axes = traced.axes(tensors_of(call)[0])
    if (moved := _moved(traced, name, call, axes, out)) is not None:
        return moved
    if name.startswith(SPATIAL):  # the last dimensions are not cut
        num_dims = next(num_dims for num_dims in (3, 2, 1) if f"{num_dims}d" in name)
        traced.fix(*axes[-num_dims:])
        return (*axes[:-num_dims], *fixed(out.shape[-num_dims:]))
    return elementwise(traced, call, out) if is_pointwise else None


def _moved(traced: Pass, name: str, call: Call, axes: Axes, out: Tensor) -> Axes | None:
    """The labels of an output that has one tensor's values, moved, cut, repeated or reduced; ``None`` for no such."""

    def dims_of(argument: str = "dim") -> list[int]:
        given = call.get(argument)
        if given is None or given == []:
            return list(range(len(axes)))
        return [dim % max(len(axes), 1) for dim in ([given] if isinstance(given, int) else given)]

    if name in SAME:
        return axes
    if name in VIEWS:
        return reshaped(traced.units, traced.splits, axes, out.shape)
    if name in REDUCED:
        gone = dims_of()
        if call.get("keepdim"):
            return tuple(fixed([1])[0] if dim in gone else labels for dim, labels in enumerate(axes))
        return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)
    new = list(axes)
    match name:
        case "permute":
            return tuple(axes[dim] for dim in dims_of("dims"))
        case "transpose" | "t" | "transpose_":
            one, two = (call.get(key, default) % max(len(axes), 1) for key, default in (("dim0", 0), ("dim1", -1)))
            if axes:
                new[one], new[two] = new[two], new[one]
        case "unsqueeze":
            new.insert(call["dim"] % out.ndim, fixed([1])[0])
        case "squeeze":
            gone = [dim for dim in dims_of() if len(axes[dim]) == 1]
            return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)
        case "expand":  # added and widened dimensions have no channels
            added = out.ndim - len(axes)
            sizes = zip(axes, out.shape[added:], strict=True)
            kept = [labels if len(labels) == size else fixed([size])[0] for labels, size in sizes]
            return (*fixed(out.shape[:added]), *kept)
        case "select" | "unbind":
            del new[call["dim"] % len(axes)]
        case "slice" | "split" | "split_with_sizes" | "chunk":
            dim = call.get("dim", 0) % len(axes)
            new[dim] = axes[dim][call.get("start") : call.get("end") : call.get("step", 1)]
        case "flip":
            gone = dims_of("dims")
            return tuple(labels[::-1] if dim in gone else labels for dim, labels in enumerate(axes))
        case "repeat":
            wide = (*fixed([1] * (out.ndim - len(axes))), *axes)
            return tuple(np.tile(labels, times) for labels, times in zip(wide, call["repeats"], strict=True))
        case "constant_pad_nd":  # padding adds no channels
            pairs = zip(call["pad"][::2], call["pad"][1::2], strict=True)
            for place, (before, after) in enumerate(pairs, start=1):
                cut = new[-place][max(-before, 0) : len(new[-place]) - max(-after, 0)]
                new[-place] = np.pad(cut, (max(before, 0), max(after, 0)), constant_values=FIXED)
        case "cumsum" | "cumprod" | "roll":  # the order or the number of values along a dimension matters
            traced.fix(*(axes[dim] for dim in dims_of()))
        case _:
            return None
    return tuple(new)
