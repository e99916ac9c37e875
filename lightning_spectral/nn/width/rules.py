"""Rules for the channels in the operations of layers, and the table of the rule for each of torch's operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_spectral.nn.width import shape_rules as shapes
from lightning_spectral.nn.width.shape_rules import (
    Axes,
    Call,
    Pass,
    Rule,
    elementwise,
    fixed,
    input_of,
    same,
    tensors_of,
    unknown,
)


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
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"), shapes.reduce),
    **dict.fromkeys(("linalg_vector_norm", "logsumexp", "norm"), shapes.reduce),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), shapes.view),
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy", "lift_fresh", "native_dropout", "_softmax"), same),
    **dict.fromkeys(("_log_softmax", "fill_", "zero_", "zeros_like", "ones_like", "empty_like", "copy"), same),
    **dict.fromkeys(("full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "contiguous"), same),
    **dict.fromkeys(("copy_", "_prelu_kernel", "where", "masked_fill", "masked_fill_"), elementwise),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"), matmul),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), shapes.sliced),
    **dict.fromkeys(("select", "unbind"), shapes.select),
    **dict.fromkeys(("transpose", "t", "transpose_"), shapes.transpose),
    **dict.fromkeys(("cumsum", "cumprod", "roll"), shapes.ordered),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"), batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), batch_norm),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_impl_index"), batch_norm),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), layer_norm),
    "native_group_norm": group_norm,
    "convolution": convolution,
    "permute": shapes.permute,
    "unsqueeze": shapes.unsqueeze,
    "squeeze": shapes.squeeze,
    "expand": shapes.expand,
    "slice": shapes.sliced,
    "flip": shapes.flip,
    "cat": shapes.cat,
    "stack": shapes.stack,
    "repeat": shapes.repeat,
    "constant_pad_nd": shapes.pad,
    "embedding": embedding,
    "index": shapes.index,
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
