"""A module without some of its channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from lightning_spectral.nn.width.plan import WidthPlan
from lightning_spectral.nn.width.rules import is_depthwise, loses_groups


@torch.no_grad()
def cut_module(module: nn.Module, indices: Mapping[str, Sequence[Tensor]]) -> None:
    """Cut parameters and buffers of a module to the indices that stay, and update the sizes that its layers store."""
    small, before = _small_tensors(module, indices), {layer: _channels(layer) for layer in module.modules()}
    for own, new in replacements(module, small):
        own.update(new)
    for layer, counts in before.items():  # an attention reads the weight of another
        _resize(layer, counts)


def cut_to(module: nn.Module, plan: WidthPlan, keep_ratio: float) -> None:
    """Cut a module to the first channels of each group."""
    cut_module(module, plan.indices(plan.first(keep_ratio)))


def replacements(module: nn.Module, small: Mapping[int, Tensor]) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """For each layer, the dictionaries of its tensors, each with the new tensors that replace some of them.

    ``small`` has new tensors by the identity of the old one, which may occur in several places.
    """
    for layer in module.modules():
        owned: list[dict[str, Any]] = [layer._parameters, layer._buffers]
        for own in owned:
            yield own, {name: small[id(tensor)] for name, tensor in own.items() if id(tensor) in small}


def take(tensor: Tensor, indices: Sequence[Tensor]) -> Tensor:
    """The part of a tensor at the given indices of each dimension."""
    for dim, index in enumerate(indices):
        if len(index) < tensor.shape[dim]:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


def cut_outputs(module: nn.Module, plan: WidthPlan) -> tuple[str, ...]:
    """Names of the linear layers and convolutions with outputs that can be cut."""
    found = []
    for name, layer in module.named_modules():
        is_transposed = (isinstance(layer, _ConvNd) and layer.transposed) or _is_transformers_linear(layer)
        labels = plan.labels.get(f"{name}.weight" if name else "weight")
        is_affine = isinstance(layer, nn.Linear | _ConvNd) or _is_transformers_linear(layer)
        if is_affine and labels is not None and labels[int(is_transposed)].any():
            found.append(name)
    return tuple(found)


def _is_transformers_linear(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf")


def _small_tensors(module: nn.Module, indices: Mapping[str, Sequence[Tensor]]) -> dict[int, Tensor]:
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    small: dict[int, Tensor] = {}
    for name, where in indices.items():
        left = take(own[name].detach(), where).clone()
        is_parameter = isinstance(own[name], nn.Parameter)
        small[id(own[name])] = nn.Parameter(left, own[name].requires_grad) if is_parameter else left
    return small


def _channels(layer: nn.Module) -> tuple[int, ...]:
    if isinstance(layer, _ConvNd):
        return layer.groups, layer.in_channels
    return (layer.num_groups, layer.num_channels) if isinstance(layer, nn.GroupNorm) else ()


def _resize(layer: Any, before: tuple[int, ...]) -> None:
    weight = getattr(layer, "weight", None)
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is not None:
        _resize_attention(layer)
    elif not isinstance(weight, Tensor):
        return
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = weight.shape
    elif isinstance(layer, _ConvNd):
        _resize_convolution(layer, weight, *before)
    elif isinstance(layer, nn.GroupNorm):
        if loses_groups(*before):
            layer.num_groups = len(weight) * layer.num_groups // layer.num_channels
        layer.num_channels = len(weight)
    elif isinstance(layer, nn.modules.batchnorm._NormBase):
        layer.num_features = len(weight)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        layer.normalized_shape = tuple(weight.shape)
    elif isinstance(layer, nn.Embedding):
        layer.embedding_dim = weight.shape[1]
    elif _is_transformers_linear(layer):
        layer.nf = weight.shape[1]


def _resize_convolution(layer: _ConvNd, weight: Tensor, groups: int, in_channels: int) -> None:
    first, second = weight.shape[:2]
    if groups > 1 and is_depthwise(groups, in_channels):
        layer.groups = first if layer.transposed else first * groups // layer.out_channels
    inner, outer = (first, second * layer.groups) if layer.transposed else (second * layer.groups, first)
    layer.in_channels, layer.out_channels = inner, outer


def _resize_attention(layer: nn.MultiheadAttention) -> None:
    layer.embed_dim = layer.kdim = layer.vdim = len(layer.out_proj.weight)
    layer.head_dim = layer.embed_dim // layer.num_heads
