"""Rules for the channels in torch's operations, and the table of the rule for each of them."""

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


def embedding(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Rows are looked up by number, so they are not cut."""
    rows, columns = traced.axes(call["weight"])
    traced.fix(rows)
    return (*fixed(out.shape[:-1]), columns)


def matmul(traced: Pass, call: Call, out: Tensor) -> Axes:
    """A product of matrices, of batches of them, or of a matrix and a vector, possibly with a bias."""
    tensors = tensors_of(call)
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


def attention(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Queries meet keys, and weights meet values."""
    query, key, value = (traced.axes(call[name]) for name in ("query", "key", "value"))
    for one, two in ((query[-1], key[-1]), (key[-2], value[-2])):
        traced.unite(one, two)
    for place in range(len(query) - 2):
        traced.unite(query[place], key[place])
        traced.unite(key[place], value[place])
    return (*query[:-1], value[-1])


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


def is_depthwise(groups: int, in_channels: int) -> bool:
    """Whether each input channel is a group of its own, so that it can go with its outputs."""
    return groups == in_channels


def batch_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Each channel has a scale, a shift and statistics."""
    axes = traced.axes(call["input"])
    for value in tensors_of(call)[1:]:
        traced.unite(traced.axes(value)[0], axes[1])
    return axes


def layer_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Each place has a scale and a shift."""
    axes = traced.axes(call["input"])
    for value in tensors_of(call)[1:]:
        for labels, own in zip(reversed(axes), reversed(traced.axes(value)), strict=False):
            traced.unite(labels, own)
    return axes


def group_norm(traced: Pass, call: Call, out: Tensor) -> Axes:
    """Whole groups are cut, or the same channels of each; a sub-model keeps the choice of the whole model."""
    axes, channels = traced.axes(call["input"]), call["C"]
    by_group = axes[1].reshape(call["group"], -1)
    groups_go, channels_go = by_group[:, :1], by_group[:1]
    if not (traced.units.agree(by_group, groups_go) or traced.units.agree(by_group, channels_go)):
        traced.units.unite(by_group, groups_go if loses_groups(call["group"], channels) else channels_go)
    for value in tensors_of(call)[1:]:
        traced.unite(traced.axes(value)[0], axes[1])
    return axes


def loses_groups(num_groups: int, num_channels: int) -> bool:
    """Whether whole groups of a GroupNorm are cut, or else the same channels of each: whichever is finer."""
    return num_groups > 1 and num_groups * num_groups >= num_channels


def spatial(num_dims: int) -> Rule:
    """The last dimensions are not cut; the others keep their labels."""

    def rule(traced: Pass, call: Call, out: Tensor) -> Axes:
        axes = traced.axes(input_of(call))
        traced.fix(*axes[-num_dims:])
        return (*axes[:-num_dims], *fixed(out.shape[-num_dims:]))

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"), reduce),
    **dict.fromkeys(("linalg_vector_norm", "logsumexp", "norm"), reduce),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), view),
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy", "lift_fresh", "native_dropout", "_softmax"), same),
    **dict.fromkeys(("_log_softmax", "fill_", "zero_", "zeros_like", "ones_like", "empty_like", "copy"), same),
    **dict.fromkeys(("full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "contiguous"), same),
    **dict.fromkeys(("copy_", "_prelu_kernel", "where", "masked_fill", "masked_fill_"), elementwise),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"), matmul),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), sliced),
    **dict.fromkeys(("select", "unbind"), select),
    **dict.fromkeys(("transpose", "t", "transpose_"), transpose),
    **dict.fromkeys(("cumsum", "cumprod", "roll"), ordered),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"), batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), batch_norm),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_impl_index"), batch_norm),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), layer_norm),
    "native_group_norm": group_norm,
    "convolution": convolution,
    "permute": permute,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "slice": sliced,
    "flip": flip,
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
    "constant_pad_nd": pad,
    "embedding": embedding,
    "index": index,
}
SPATIAL = (
    *("max_pool", "avg_pool", "adaptive_", "_adaptive_", "fractional_max_pool", "mkldnn_max_pool", "mkldnn_adaptive_"),
    *("upsample_", "_upsample_", "reflection_pad", "replication_pad"),
)


def pieces(name: str, call: Call, outs: Sequence[Tensor]) -> list[Call]:
    """The arguments that determine each output: for the pieces of a split tensor, those of slices."""
    if name == "unbind":
        return [{"dim": 0, **call}] * len(outs)
    if name not in ("split", "split_with_sizes", "chunk"):
        return [call] * len(outs)
    ends = np.cumsum([out.shape[call.get("dim", 0)] for out in outs]).tolist()
    return [{**call, "start": start, "end": end} for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def rule_for(name: str, is_pointwise: bool) -> Rule:
    """The rule for an operation by its bare name, e.g. ``"add"``; the rule for an unknown one cuts nothing."""
    if name in RULES:
        return RULES[name]
    if "scaled_dot_product" in name:
        return attention
    if name.startswith(SPATIAL):
        return spatial(next(num_dims for num_dims in (3, 2, 1) if f"{num_dims}d" in name))
    return elementwise if is_pointwise else unknown
