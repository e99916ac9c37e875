"""Facts about torch's modules: running averages, weights that hooks compute, and tensors with a type of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

ModuleT = TypeVar("ModuleT", bound=nn.Module)
Move = Callable[[Tensor], Tensor]


def layers_with_averages(module: nn.Module) -> dict[str, _NormBase]:
    """The normalisation layers that have running averages, by name.

    Example:
        >>> norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2)]
        >>> list(layers_with_averages(nn.Sequential(*norms)))
        ['0']
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _NormBase)}
    return {name: layer for name, layer in layers.items() if layer.running_mean is not None}


def use_batch_statistics(module: ModuleT) -> ModuleT:
    """A copy of a module whose normalisation layers use each batch's own statistics, even in evaluation.

    Running statistics are buffers that clients would have to average. Without them there is nothing to average, but a
    prediction depends on the other examples in its batch.

    Reference:
        The published code of Niu et al. (2022) trains and evaluates this way.

    Example:
        >>> net = use_batch_statistics(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> list(net.buffers())
        []
    """
    copied = copy.deepcopy(module)
    for layer in copied.modules():
        if isinstance(layer, _NormBase):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    return copied


def weight_hooks(layer: nn.Module) -> list[Any]:
    """The hooks of ``torch.nn.utils``, such as that of its `weight_norm`, that compute a weight before every pass."""
    hooks = layer._forward_pre_hooks.values()
    return [hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils.")]


def keeping_type(move: Move, at_least: torch.dtype | None = None) -> Move:
    """What ``nn.Module._apply`` calls for a tensor that moves with its module but keeps its type.

    With ``at_least``, the tensor follows its module's type, but is never narrower than this one.

    Example:
        >>> keeping_type(torch.Tensor.half)(torch.zeros(2)).dtype
        torch.float32
        >>> moves = torch.Tensor.half, torch.Tensor.double
        >>> [keeping_type(move, at_least=torch.float32)(torch.zeros(2)).dtype for move in moves]
        [torch.float32, torch.float64]
    """

    def moved(tensor: Tensor) -> Tensor:
        there, dtype = move(tensor), tensor.dtype
        if at_least is not None:
            dtype = torch.promote_types(there.dtype, at_least) if there.dtype.is_floating_point else there.dtype
        return there if there.dtype == dtype else tensor.to(there.device, dtype)  # not through the narrower type

    return moved
