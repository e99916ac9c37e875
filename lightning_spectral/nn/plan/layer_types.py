"""The sharded layers that replace dense ones, and the reasons why some dense layers stay whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_spectral.functional.checks import has_values
from lightning_spectral.nn.layers import conv, linear, sequences, tucker
from lightning_spectral.nn.layers.sharded import ShardedLayer
from lightning_spectral.nn.layers.terms import WeightBlock

ShardedType = type[ShardedLayer]

SHARDED_LAYERS: Mapping[type[nn.Module], ShardedType] = {
    nn.Linear: linear.SpectralShardedLinear,
    nn.Conv1d: conv.SpectralShardedConv1d,
    nn.Conv2d: conv.SpectralShardedConv2d,
    nn.Conv3d: conv.SpectralShardedConv3d,
    nn.MultiheadAttention: sequences.SpectralShardedMultiheadAttention,
    nn.modules.linear.NonDynamicallyQuantizableLinear: linear.SpectralShardedLinear,  # an attention's `out_proj`
    nn.LSTM: sequences.SpectralShardedLSTM,
    nn.GRU: sequences.SpectralShardedGRU,
}
GROUPED: Mapping[type[nn.Module], ShardedType] = {
    nn.Conv1d: conv.SpectralShardedGroupedConv1d,
    nn.Conv2d: conv.SpectralShardedGroupedConv2d,
    nn.Conv3d: conv.SpectralShardedGroupedConv3d,
}
SPLIT: Mapping[ShardedType, ShardedType] = {
    linear.SpectralShardedLinear: linear.SpectralShardedSplitLinear,
    linear.SpectralShardedTransposedLinear: linear.SpectralShardedSplitTransposedLinear,
}
# Layers of libraries that this package does not import, by the name of their class.
BY_NAME: Mapping[str, ShardedType] = {"transformers.pytorch_utils.Conv1D": linear.SpectralShardedTransposedLinear}
AFFINE = (nn.Linear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def is_affine(layer: nn.Module) -> bool:
    """Whether a layer applies weights that could be factorised, supported or not."""
    return isinstance(layer, AFFINE) or qualified_name(layer) in BY_NAME


def type_name(layer: nn.Module) -> str:
    """The name of a layer's class, with its package if torch has another affine layer of that name."""
    kind = type(layer)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}" if is_namesake(layer) else kind.__name__


def is_namesake(layer: nn.Module) -> bool:
    """Whether a layer has the name of an affine layer of torch but is of another class, such as a library's."""
    kind = type(layer)
    torchs = getattr(nn, kind.__name__, None)
    return isinstance(torchs, type) and issubclass(torchs, AFFINE) and torchs is not kind


def is_uninitialised(layer: nn.Module) -> bool:
    """Whether a layer has parameters of its own that get their shapes in its first forward pass."""
    return any(is_lazy(parameter) for parameter in layer.parameters(recurse=False))


def sharded_type(layer: nn.Module, num_parts: int = 1, convolutions: str = "matrix") -> ShardedType | None:
    """The class that replaces a dense layer; subclasses may compute anything, so they have none."""
    if getattr(layer, "groups", 1) != 1:
        return GROUPED.get(type(layer))
    if type(layer) in GROUPED and set(cast(_ConvNd, layer).kernel_size) != {1}:
        if convolutions == "tucker":
            return tucker.TuckerConv
        if convolutions == "spatial" and type(layer) is nn.Conv2d:
            return conv.SpectralShardedSpatialConv2d
    whole = SHARDED_LAYERS.get(type(layer)) or BY_NAME.get(qualified_name(layer))
    return whole if whole is None or num_parts == 1 else SPLIT.get(whole)


def refusal(layer: nn.Module) -> str | None:
    """The reason why an affine layer has no sharded counterpart; ``None`` if it has one.

    Example:
        >>> refusal(nn.ConvTranspose2d(3, 4, 5)), refusal(nn.Conv2d(4, 4, 3, groups=4))
        ('ConvTranspose2d is not supported', 'depthwise: a single term in each group')
    """
    if is_parametrized(layer):
        return "its weight is parametrised"
    for name in ("forward", "_conv_forward"):
        if name in vars(layer):
            return f"its `{name}` was replaced on the instance"
    for name, parameter in layer.named_parameters(recurse=False):
        if has_gradient_hook(parameter):
            return f"its `{name}` has a gradient hook"
    sharded = sharded_type(layer)
    if sharded is None:
        return f"{type_name(layer)} is not supported"
    if isinstance(layer, nn.MultiheadAttention) and (layer.bias_k is not None or layer.add_zero_attn):
        return "`add_bias_kv` and `add_zero_attn` are not supported"
    try:
        blocks = sharded.blocks_of(layer)
    except AttributeError:  # from `get_parameter`, which a computed tensor does not satisfy
        blocks = ()
    own = {name for name, _ in layer.named_parameters(recurse=False)}
    if not blocks or not own.issuperset(block.parameter for block in blocks):
        return "its weight is computed, not a plain parameter"
    if all(block.num_singular == 1 for block in blocks):
        return "a single term" if getattr(layer, "groups", 1) == 1 else "depthwise: a single term in each group"
    return None


def has_gradient_hook(tensor: Tensor) -> bool:
    """Whether there are hooks on a tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def qualified_name(layer: nn.Module) -> str:
    """The name of a layer's class with that of its module, for libraries that this package does not import."""
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


ZERO, ONE = "zero: it has no singular terms", "constant: its rank of 1 would never grow"
LOW_RANK = "low-rank factor"
Shapes = Mapping[str, tuple[int, int]]


def missing_rank(layer: nn.Module, blocks: Iterable[WeightBlock]) -> str | None:
    """The reason to keep a layer whole because of its present weight; ``None`` if a matrix has terms to choose from.

    A term of size zero has no gradient, so the rank of a sharded matrix never grows. Zeros would stay zeros, and a
    constant matrix would stay of rank one. Other weights of low rank, such as truncated ones, are low on purpose.
    Weights without values count as having full rank.
    """
    blocks = list(blocks)
    for block in blocks:
        matrix = block.matrix(layer.get_parameter(block.parameter).detach())
        first = matrix[0, 0] if matrix.numel() and has_values(matrix) else None
        if first is None or not (bool((matrix == first).all()) and bool(torch.isfinite(first))):
            continue  # not all entries are the same
        if (rank := int(bool(first))) < min(2, block.num_singular):
            return f"{'its weight' if len(blocks) == 1 else 'a part of its weight'} is {ONE if rank else ZERO}"
    return None


def low_rank_factors(module: nn.Module, trained: Shapes, frozen: Shapes) -> frozenset[str]:
    """Names of the layers that are a factor of a low-rank update B A of another layer's weight W.

    They are cheap because they have few terms: a client that held some of these would save next to nothing. Also, B is
    zero at first, so it has no terms at all. A layer is a factor if

    - a part of its dotted name begins with ``lora``, in upper or lower case, as in PEFT (``lora_A.default``); or
    - it is one of a pair B (c_out, r), A (r, c_in) of trained layers in the same module as a frozen W (c_out, c_in),
      with r < min(c_out, c_in). A ``ModuleDict`` or ``ModuleList`` between a layer and that module does not count.

    ``trained`` and ``frozen`` have the shapes of the weights of affine layers, as matrices, by name.

    Example:
        >>> adapted = nn.ModuleDict({"base": nn.Linear(8, 6), "down": nn.Linear(8, 2), "up": nn.Linear(2, 6)})
        >>> shapes = {"down": (2, 8), "up": (6, 2)}
        >>> sorted(low_rank_factors(adapted, shapes, {"base": (6, 8)})), low_rank_factors(adapted, shapes, {})
        (['down', 'up'], frozenset())
    """

    def owner(name: str) -> str:
        path = name.rpartition(".")[0]
        while path and isinstance(module.get_submodule(path), nn.ModuleDict | nn.ModuleList):
            path = path.rpartition(".")[0]
        return path

    found = {name for name in trained if any(part.lower().startswith("lora") for part in name.split("."))}
    beside: dict[str, list[str]] = defaultdict(list)
    for name in trained:
        beside[owner(name)].append(name)
    for base, (rows, columns) in frozen.items():
        siblings = beside[owner(base)]
        for down in siblings:
            rank = trained[down][0]
            if trained[down] == (rank, columns) and rank < min(rows, columns):
                found.update(name for up in siblings if trained[up] == (rows, rank) for name in (down, up))
    return frozenset(found)
