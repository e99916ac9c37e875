"""Finds the layers of a module that already have an adapter, or can have one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from lightning_spectral.arguments import matches_any
from lightning_spectral.nn.adapters.layer import AdaptedLayer, peft_layers
from lightning_spectral.nn.layers.linear import SpectralShardedLinear, SpectralShardedTransposedLinear
from lightning_spectral.nn.plan.layer_types import is_affine, sharded_type


def adapted_layers(
    module: nn.Module, patterns: Sequence[str], trained: Sequence[str], scale: float = 1.0
) -> tuple[AdaptedLayer, ...]:
    """The layers of a module that have a PEFT adapter; if there are none, those that get one, with this ``scale``.

    ``patterns`` match names of layers. ``trained`` match what is trained whole, and so needs no adapter.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> adapted_layers(net, ["*"], trained=["2"])
        (AdaptedLayer(name='0', out_features=3, in_features=4, transposed=False, scale=1.0),)
        >>> adapted_layers(net, ["1"], trained=[])
        Traceback (most recent call last):
        ValueError: `layers`: '1' matches no linear layer that can have an adapter. Give patterns of names such as '0'.
    """
    existing = peft_layers(module)
    if left_out := [layer.name for layer in existing if not matches_any(layer.name, patterns)]:
        raise ValueError(f"`layers` leaves out {left_out[0]!r}, to which PEFT gave an adapter; leave `layers` at '*'.")
    return existing or tuple(
        _described(name, module.get_submodule(name), scale) for name in _chosen(module, patterns, trained)
    )


def _chosen(module: nn.Module, patterns: Sequence[str], trained: Sequence[str]) -> list[str]:
    refused = _refusals(module)
    free = {name: reason for name, reason in refused.items() if not matches(name, trained)}
    able = [name for name, reason in free.items() if not reason]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in able):
            why_not = {name: why or "is trained whole, by `train`" for name, why in refused.items() if name not in able}
            reasons = [f"{name!r} {why}" for name, why in why_not.items() if fnmatchcase(name, pattern)]
            found = f": {'; '.join(reasons[:5])}" if reasons else ""
            remedy = f" Give patterns of names such as {able[0]!r}." if able else ""
            raise ValueError(f"`layers`: {pattern!r} matches no linear layer that can have an adapter{found}.{remedy}")
    return [name for name in able if matches_any(name, patterns)]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a dotted name, or the name of a module that contains it.

    Example:
        >>> matches("head.0.weight", ["head"]), matches("head.0.weight", ["*.weight"]), matches("ahead.bias", ["head"])
        (True, True, False)
    """
    parts = name.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(matches_any(prefix, patterns) for prefix in prefixes)


def _refusals(module: nn.Module) -> dict[str, str]:
    """For each affine layer, the reason why it cannot have an adapter; empty if it can."""
    owners: Mapping[int, list[str]] = defaultdict(list)
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            owners[id(parameter)].append(name)
    return {name: _refusal(name, part, owners) for name, part in module.named_modules() if is_affine(part)}


def _refusal(name: str, layer: nn.Module, owners: Mapping[int, Sequence[str]]) -> str:
    kind = type(layer)
    weight = layer._parameters.get("weight")
    if kind is NonDynamicallyQuantizableLinear:
        return "is never called: an attention reads its weight"
    if sharded_type(layer) not in (SpectralShardedLinear, SpectralShardedTransposedLinear):
        return f"is a {kind.__name__}"
    if weight is None or is_parametrized(layer):
        return "has a computed weight"
    if not weight.is_floating_point():
        return f"has a weight of type {weight.dtype}"
    if others := [other for other in owners[id(weight)] if other != name]:
        return f"shares its weight with {others[0]!r}"
    return ""


def _described(name: str, layer: Any, scale: float) -> AdaptedLayer:
    transposed = sharded_type(layer) is SpectralShardedTransposedLinear
    rows, columns = layer.weight.shape
    return AdaptedLayer(name, *((columns, rows) if transposed else (rows, columns)), transposed, scale)
