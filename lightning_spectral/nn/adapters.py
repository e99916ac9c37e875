"""Low-rank adapters on linear layers: which layers can have one, and how a device attaches it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from lightning_spectral.nn.layers.linear import SpectralShardedLinear, SpectralShardedTransposedLinear
from lightning_spectral.nn.plan.layer_types import is_affine, sharded_type

A, B, OMEGA = "lora_A", "lora_B", "lora_omega"  # what a device adds to a layer


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer that gets an adapter.

    Attributes:
        name: Its dotted name.
        out_features: Number c_out of outputs.
        in_features: Number c_in of inputs.
        transposed: Whether its weight has the shape ``(c_in, c_out)``, as in the ``Conv1D`` of transformers.
    """

    name: str
    out_features: int
    in_features: int
    transposed: bool = False

    @property
    def weight(self) -> str:
        """Name of its weight."""
        return self.tensor("weight")

    def tensor(self, own: str) -> str:
        """Full name of one of the layer's tensors."""
        return f"{self.name}.{own}" if self.name else own


def adapted_layers(module: nn.Module, patterns: Sequence[str], trained: Sequence[str]) -> tuple[AdaptedLayer, ...]:
    """The layers of a module that get an adapter, in order of registration.

    Args:
        module: Any module.
        patterns: Shell-style patterns of layer names.
        trained: Patterns of what is trained whole and so needs no adapter.

    Raises:
        ValueError: If a pattern matches no layer that can have one; it says what it does match, and why that cannot.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> adapted_layers(net, ["*"], trained=["2"])
        (AdaptedLayer(name='0', out_features=3, in_features=4, transposed=False),)
        >>> adapted_layers(net, ["1"], trained=[])
        Traceback (most recent call last):
        ValueError: `layers`: '1' matches no linear layer that can have an adapter. Give patterns of names such as '0'.
    """
    refused = _refusals(module)
    free = {name: reason for name, reason in refused.items() if not matches(name, trained)}
    able = [name for name, reason in free.items() if not reason]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in able):
            reasons = [f"{name!r} {why}" for name, why in refused.items() if why and fnmatchcase(name, pattern)]
            found = f": {'; '.join(reasons[:5])}" if reasons else ""
            remedy = f" Give patterns of names such as {able[0]!r}." if able else ""
            raise ValueError(f"`layers`: {pattern!r} matches no linear layer that can have an adapter{found}.{remedy}")
    chosen = [name for name in able if any(fnmatchcase(name, pattern) for pattern in patterns)]
    return tuple(_described(name, module.get_submodule(name)) for name in chosen)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a dotted name, or that of a module that it is in.

    Example:
        >>> matches("head.0.weight", ["head"]), matches("head.0.weight", ["*.weight"]), matches("ahead.bias", ["head"])
        (True, True, False)
    """
    parts = name.split(".")
    prefixes = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return any(fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in patterns)


def _refusals(module: nn.Module) -> dict[str, str]:
    """For each affine layer why it can have no adapter; empty if it can."""
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


def _described(name: str, layer: Any) -> AdaptedLayer:
    transposed = sharded_type(layer) is SpectralShardedTransposedLinear
    rows, columns = layer.weight.shape
    return AdaptedLayer(name, *((columns, rows) if transposed else (rows, columns)), transposed)


@dataclass(frozen=True)
class AddProduct:
    """A forward hook that adds ``scale B diag(omega) A x`` to the output of a layer.

    Attributes:
        scale: Factor on the product of the factors.
    """

    scale: float

    def __call__(self, layer: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """The output of the adapted layer."""
        (x,) = (*args, *kwargs.values())
        hidden = F.linear(x, layer.lora_A) * self.scale
        if layer.lora_omega is not None:
            hidden = hidden * layer.lora_omega
        return output + F.linear(hidden, layer.lora_B)


def attach_adapter(module: nn.Module, adapted: AdaptedLayer, rank: int, scale: float, multiplied: bool) -> None:
    """Give a layer the parameters ``lora_A``, ``(rank, c_in)``, and ``lora_B``, ``(c_out, rank)``, both zero.

    Args:
        module: The module that the layer is in; its weight becomes frozen.
        adapted: The layer.
        rank: Number of terms.
        scale: Factor on the product.
        multiplied: Whether terms have multipliers, the buffer ``lora_omega`` of shape ``(rank,)``.
    """
    layer = module.get_submodule(adapted.name)
    weight = layer.get_parameter("weight").requires_grad_(False)
    layer.register_parameter(A, nn.Parameter(weight.new_zeros(rank, adapted.in_features)))
    layer.register_parameter(B, nn.Parameter(weight.new_zeros(adapted.out_features, rank)))
    layer.register_buffer(OMEGA, torch.ones_like(weight[0, :1]).repeat(rank) if multiplied else None)
    # first of all hooks, so that the user's own see the output of the adapted layer
    layer.register_forward_hook(AddProduct(scale), prepend=True, with_kwargs=True)
