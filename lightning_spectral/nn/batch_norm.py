"""Normalisation over the batch: the layers that keep running averages, and how to do without them."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def layers_with_averages(module: nn.Module) -> dict[str, _NormBase]:
    """The normalisation layers that have running averages, by name.

    Example:
        >>> norms = [nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.InstanceNorm1d(2)]
        >>> list(layers_with_averages(nn.Sequential(*norms)))
        ['0']
    """
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, _NormBase)}
    return {name: layer for name, layer in layers.items() if layer.running_mean is not None}


def names_of_averages(module: nn.Module) -> list[str]:
    """Names of the running means and variances of a module's normalisation layers."""
    parts = ("running_mean", "running_var")
    return [f"{layer}.{part}" if layer else part for layer in layers_with_averages(module) for part in parts]


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
