"""The rule for each of torch's operations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from lightning_spectral.nn.width import layer_rules as layers
from lightning_spectral.nn.width import shape_rules as shapes
from lightning_spectral.nn.width.labelling import Call, Rule, elementwise, same, unknown

RULES: dict[str, Rule] = {
    **dict.fromkeys(("mean", "sum", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean"), shapes.reduce),
    **dict.fromkeys(("linalg_vector_norm", "logsumexp", "norm"), shapes.reduce),
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy"), shapes.view),
    **dict.fromkeys(("clone", "detach", "alias", "_to_copy", "lift_fresh", "native_dropout", "_softmax"), same),
    **dict.fromkeys(("_log_softmax", "fill_", "zero_", "zeros_like", "ones_like", "empty_like", "copy"), same),
    **dict.fromkeys(("full_like", "rand_like", "randn_like", "bernoulli", "bernoulli_", "contiguous"), same),
    **dict.fromkeys(("copy_", "_prelu_kernel", "where", "masked_fill", "masked_fill_"), elementwise),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "matmul"), layers.matmul),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), shapes.sliced),
    **dict.fromkeys(("select", "unbind"), shapes.select),
    **dict.fromkeys(("transpose", "t", "transpose_"), shapes.transpose),
    **dict.fromkeys(("cumsum", "cumprod", "roll"), shapes.ordered),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "batch_norm"), layers.batch_norm),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_no_training"), layers.batch_norm),
    **dict.fromkeys(("_batch_norm_with_update", "_batch_norm_no_update", "_batch_norm_impl_index"), layers.batch_norm),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), layers.layer_norm),
    "native_group_norm": layers.group_norm,
    "convolution": layers.convolution,
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
    "embedding": layers.embedding,
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
        return layers.attention
    if name.startswith(SPATIAL):
        return layers.spatial(next(num_dims for num_dims in (3, 2, 1) if f"{num_dims}d" in name))
    return elementwise if is_pointwise else unknown
