"""What each of torch's operations says about the channels of its inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.nn.width.reshaping import Splits, reshaped
from lightning_spectral.nn.width.units import FIXED, Labels, Units

Axes: TypeAlias = tuple[Labels, ...]  # the labels along each dimension of a tensor
Call: TypeAlias = Mapping[str, Any]  # an operation's arguments by name


@dataclass(frozen=True, eq=False)
class Pass:
    """One traced forward pass.

    Attributes:
        units: Classes of labels.
        splits: What is cut where a dimension is split.
        axes: The labels of a tensor that was met.
    """

    units: Units
    splits: Splits
    axes: Callable[[Tensor], Axes]

    def unite(self, some: Labels, others: Labels) -> None:
        """Unite the labels of two dimensions; one of size 1 is broadcast, and says nothing."""
        if len(some) == len(others):
            self.units.unite(some, others)

    def fix(self, *labels: Labels) -> None:
        """Never cut some dimensions."""
        for those in labels:
            self.units.fix(those)


Rule: TypeAlias = Callable[[Pass, Call, Tensor], Axes]


def fixed(shape: Sequence[int]) -> Axes:
    """Labels of a tensor that is never cut."""
    return tuple(np.full(size, FIXED) for size in shape)


def elementwise(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Values at equal places belong together."""
    axes = list(fixed(out.shape))
    of_inputs = [traced.axes(value) for value in _tensors(call)]
    for place, size in enumerate(reversed(out.shape), start=1):
        found = [own[-place] for own in of_inputs if len(own) >= place and len(own[-place]) == size]
        for labels in found[1:]:
            traced.unite(found[0], labels)
        axes[-place] = found[0] if found else axes[-place]
    return tuple(axes)


def same(traced: Pass, call: Call, out: Tensor) -> Axes:
    """The output has the dimensions of the first argument."""
    return traced.axes(_first(call))


def _tensors(call: Call) -> list[Tensor]:
    values = [v for value in call.values() for v in (value if isinstance(value, list | tuple) else [value])]
    return [value for value in values if isinstance(value, Tensor)]


def _first(call: Call) -> Tensor:
    return _tensors(call)[0]


def _dims(call: Call, ndim: int, name: str = "dim") -> list[int]:
    given = call.get(name)
    if given is None or given == []:
        return list(range(ndim))
    return [dim % max(ndim, 1) for dim in ([given] if isinstance(given, int) else given)]


def _reduce(traced: Pass, call: Call, out: Tensor) -> Axes:
    if "other" in call:  # the larger of two tensors
        return elementwise(traced, call, out)
    axes = traced.axes(_first(call))
    gone = _dims(call, len(axes))
    if call.get("keepdim"):
        return tuple(fixed([1])[0] if dim in gone else labels for dim, labels in enumerate(axes))
    return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)


def _view(traced: Pass, call: Call, out: Tensor) -> Axes:
    return reshaped(traced.units, traced.splits, traced.axes(_first(call)), out.shape)


def _permute(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    return tuple(axes[dim] for dim in _dims(call, len(axes), "dims"))


def _transpose(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = list(traced.axes(_first(call)))
    one, two = (call.get(name, default) % max(len(axes), 1) for name, default in (("dim0", 0), ("dim1", -1)))
    if axes:
        axes[one], axes[two] = axes[two], axes[one]
    return tuple(axes)


def _unsqueeze(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = list(traced.axes(_first(call)))
    axes.insert(call["dim"] % out.ndim, fixed([1])[0])
    return tuple(axes)


def _squeeze(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    gone = [dim for dim in _dims(call, len(axes)) if len(axes[dim]) == 1]
    return tuple(labels for dim, labels in enumerate(axes) if dim not in gone)


def _expand(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    added = out.ndim - len(axes)
    kept = [
        labels if len(labels) == size else fixed([size])[0]
        for labels, size in zip(axes, out.shape[added:], strict=True)
    ]
    return (*fixed(out.shape[:added]), *kept)


def _select(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    dim = call["dim"] % len(axes)
    return axes[:dim] + axes[dim + 1 :]


def _along(traced: Pass, call: Call, dim: int, labels: Labels) -> Axes:
    axes = list(traced.axes(_first(call)))
    axes[dim] = labels
    return tuple(axes)


def _slice(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    dim = call.get("dim", 0) % len(axes)
    return _along(traced, call, dim, axes[dim][call.get("start") : call.get("end") : call.get("step", 1)])


def _flip(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    return tuple(labels[::-1] if dim in _dims(call, len(axes), "dims") else labels for dim, labels in enumerate(axes))


def _cat(traced: Pass, call: Call, out: Tensor) -> Axes:
    pieces = [axes for axes in map(traced.axes, call["tensors"]) if len(axes) == out.ndim]  # not torch's empty ones
    dim = call.get("dim", 0) % out.ndim
    for axes in pieces[1:]:
        for place in range(out.ndim):
            if place != dim:
                traced.unite(pieces[0][place], axes[place])
    return (*pieces[0][:dim], np.concatenate([axes[dim] for axes in pieces]), *pieces[0][dim + 1 :])


def _stack(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = list(elementwise(traced, call, call["tensors"][0]))
    axes.insert(call.get("dim", 0) % out.ndim, fixed([len(call["tensors"])])[0])
    return tuple(axes)


def _repeat(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(_first(call))
    axes = (*fixed([1] * (out.ndim - len(axes))), *axes)
    return tuple(np.tile(labels, times) for labels, times in zip(axes, call["repeats"], strict=True))


def _pad(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = list(traced.axes(_first(call)))
    pairs = zip(call["pad"][::2], call["pad"][1::2], strict=True)
    for place, (before, after) in enumerate(pairs, start=1):
        cut = axes[-place][max(-before, 0) : len(axes[-place]) - max(-after, 0)]
        axes[-place] = np.pad(cut, (max(before, 0), max(after, 0)), constant_values=FIXED)
    return tuple(axes)


def _embedding(traced: Pass, call: Call, out: Tensor) -> Axes:
    rows, columns = traced.axes(call["weight"])
    traced.fix(rows)
    return (*fixed(out.shape[:-1]), columns)


def _index(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Along indexed dimensions nothing is cut."""
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


def _matmul(traced: Pass, call: Call, out: Tensor) -> Axes:
    """A product of matrices, of batches of them, or of a matrix and a vector, with a bias for some."""
    tensors = _tensors(call)
    bias, (left, right) = tensors[:-2], map(traced.axes, tensors[-2:])
    inner = right[-2] if len(right) > 1 else right[-1]
    traced.unite(left[-1], inner)
    for one, two in zip(left[:-2], right[:-2], strict=True):
        traced.unite(one, two)
    axes = (*left[:-1], *(right[-1:] if len(right) > 1 else ()))
    for own in map(traced.axes, bias):
        for labels, others in zip(reversed(own), reversed(axes), strict=False):
            traced.unite(labels, others)
    return axes


def _attention(traced: Pass, call: Call, out: Tensor) -> Axes:
    query, key, value = (traced.axes(call[name]) for name in ("query", "key", "value"))
    for one, two in ((query[-1], key[-1]), (key[-2], value[-2])):
        traced.unite(one, two)
    for place in range(len(query) - 2):
        traced.unite(query[place], key[place])
        traced.unite(key[place], value[place])
    return (*query[:-1], value[-1])


def _convolution(traced: Pass, call: Call, out: Tensor) -> Axes:
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


def is_depthwise(groups: int, in_channels: int) -> bool:
    """Whether each input channel is a group of its own, so that it can go with its outputs."""
    return groups == in_channels


def _batch_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(call["input"])
    for value in _tensors(call)[1:]:
        traced.unite(traced.axes(value)[0], axes[1])
    return axes


def _layer_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes = traced.axes(call["input"])
    for value in _tensors(call)[1:]:
        for labels, own in zip(reversed(axes), reversed(traced.axes(value)), strict=False):
            traced.unite(labels, own)
    return axes


def _group_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    axes, channels = traced.axes(call["input"]), call["C"]
    by_group = axes[1].reshape(call["group"], -1)
    traced.units.unite(by_group, by_group[:, :1] if loses_groups(call["group"], channels) else by_group[:1])
    for value in _tensors(call)[1:]:
        traced.unite(traced.axes(value)[0], axes[1])
    return axes


def loses_groups(num_groups: int, num_channels: int) -> bool:
    """Whether whole groups of a GroupNorm go; else the same channels of each: what leaves the finer choice.

    Example:
        >>> loses_groups(32, 64), loses_groups(8, 64), loses_groups(2, 64)
        (True, True, False)
    """
    return num_groups > 1 and num_groups * num_groups >= num_channels


def _spatial(num_dims: int) -> Rule:
    """All but the last dimensions stay."""

    def rule(traced: Pass, call: Call, out: Tensor) -> Axes:
        axes = traced.axes(_first(call))
        traced.fix(*axes[-num_dims:])
        return (*axes[:-num_dims], *fixed(out.shape[-num_dims:]))

    return rule


def _ordered(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Along one dimension the order matters, or the number of values: nothing of it is cut."""
    axes = traced.axes(_first(call))
    traced.fix(*(axes[dim] for dim in _dims(call, len(axes))))
    return axes


def unknown(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Nothing of the inputs is cut."""
    for value in _tensors(call):
        traced.fix(*traced.axes(value))
    return fixed(out.shape)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"), _reduce),
    **dict.fromkeys(("linalg_vector_norm", "logsumexp", "norm"), _reduce),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), _view),
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy", "lift_fresh", "native_dropout", "_softmax"), same),
    **dict.fromkeys(("_log_softmax", "fill_", "zero_", "zeros_like", "ones_like", "empty_like", "copy"), same),
    **dict.fromkeys(("full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "contiguous"), same),
    **dict.fromkeys(("copy_", "_prelu_kernel", "where", "masked_fill", "masked_fill_"), elementwise),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"), _matmul),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _slice),
    **dict.fromkeys(("select", "unbind"), _select),
    **dict.fromkeys(("transpose", "t", "transpose_"), _transpose),
    **dict.fromkeys(("cumsum", "cumprod", "roll"), _ordered),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"), _batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), _batch_norm),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_impl_index"), _batch_norm),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), _layer_norm),
    "native_group_norm": _group_norm,
    "convolution": _convolution,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "flip": _flip,
    "cat": _cat,
    "stack": _stack,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "embedding": _embedding,
    "index": _index,
}
SPATIAL = (
    *("max_pool", "avg_pool", "adaptive_", "_adaptive_", "fractional_max_pool", "mkldnn_max_pool", "mkldnn_adaptive_"),
    *("upsample_", "_upsample_", "reflection_pad", "replication_pad"),
)


def pieces(name: str, call: Call, outs: Sequence[Tensor]) -> list[Call]:
    """The arguments from which each output follows: those of slices, for the pieces of a split tensor."""
    if name == "unbind":
        return [{"dim": 0, **call}] * len(outs)
    if name not in ("split", "split_with_sizes", "chunk"):
        return [call] * len(outs)
    ends = np.cumsum([out.shape[call.get("dim", 0)] for out in outs]).tolist()
    return [{**call, "start": start, "end": end} for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def rule_for(name: str, is_pointwise: bool) -> Rule:
    """The rule of an operation; that of an unknown one cuts nothing.

    Args:
        name: Its name without namespace and overload, e.g. ``"add"``.
        is_pointwise: Whether torch says that it acts on each value by itself.
    """
    if name in RULES:
        return RULES[name]
    if "scaled_dot_product" in name:
        return _attention
    if name.startswith(SPATIAL):
        return _spatial(next(num_dims for num_dims in (3, 2, 1) if f"{num_dims}d" in name))
    return elementwise if is_pointwise else unknown
