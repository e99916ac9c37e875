"""Low-rank adapters on linear layers: which layers have or can have one, and how a device attaches it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from lightning_spectral.arguments import matches_any
from lightning_spectral.nn.layers.linear import SpectralShardedLinear, SpectralShardedTransposedLinear
from lightning_spectral.nn.layers.terms import join
from lightning_spectral.nn.plan.layer_types import is_affine, qualified_name, sharded_type

OMEGA = "lora_omega"


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer that gets an adapter with the product ``scale B A``."""

    brings_factors: ClassVar[bool] = False  # whether the server's module has the factors, so that nothing is merged

    name: str
    out_features: int
    in_features: int
    transposed: bool = False  # whether its weight is (c_in, c_out), as in the `Conv1D` of transformers
    scale: float = 1.0

    @property
    def weight(self) -> str:
        return join(self.name, "weight")

    @property
    def parts(self) -> Mapping[str, str]:
        """Names on a device of its factors ``"A"``, shape ``(r, c_in)``, and ``"B"``, shape ``(c_out, r)``.

        Also of ``"omega"``, the multipliers of its terms, shape ``(r,)``.
        """
        own = {"A": "lora_A", "B": "lora_B", "omega": OMEGA}
        return {part: join(self.name, name) for part, name in own.items()}

    @property
    def factors(self) -> dict[str, str]:
        return {part: self.parts[part] for part in ("A", "B")}

    @property
    def folded(self) -> Mapping[str, str]:
        """Names in a download of the frozen weight, ``"base"``, and of the factors that a device adds to it.

        These are not names of the sub-model, whose weight is their sum.
        """
        own = {"base": "lora_base", "A": "lora_rest_A", "B": "lora_rest_B"}
        return {part: join(self.name, name) for part, name in own.items()}

    def fold(self, tensors: dict[str, Tensor]) -> None:
        """Replace the tensors of `folded` in a download by the weight, ``base + scale B A``."""
        names = self.folded
        weight = tensors.pop(names["base"])
        if names["A"] in tensors:
            A, B = tensors.pop(names["A"]), tensors.pop(names["B"])
            left, right = (A.T, B.T) if self.transposed else (B, A)
            weight = torch.addmm(weight, left, right, alpha=self.scale)
        tensors[self.weight] = weight

    @property
    def origins(self) -> dict[str, str]:
        """For each factor, the parameter of the server's module whose optimizer options it gets."""
        return dict.fromkeys(self.factors.values(), self.weight)

    def check_rank(self, max_rank: int) -> None:
        """Raise ``ValueError`` unless the largest rank of all clients is possible here."""
        if max_rank > (most := min(self.out_features, self.in_features)):
            raise ValueError(
                f"`rank` must be at most {most} for the layer {self.name!r}, which has {self.in_features} inputs and "
                f"{self.out_features} outputs, got {max_rank}; lower it, or leave the layer out by `layers`, or train "
                "it whole by `train`."
            )

    def attach(self, client: nn.Module, rank: int, multiplied: bool) -> None:
        """Freeze the layer's weight in a copy of the server's module, and give it factors of zero."""
        layer = client.get_submodule(self.name)
        weight = layer.get_parameter("weight").requires_grad_(False)
        layer.register_parameter("lora_A", nn.Parameter(weight.new_zeros(rank, self.in_features)))
        layer.register_parameter("lora_B", nn.Parameter(weight.new_zeros(self.out_features, rank)))
        layer.register_buffer(OMEGA, torch.ones_like(weight[0, :1]).repeat(rank) if multiplied else None)
        # before all other hooks, so that the user's own see the output of the adapted layer
        layer.register_forward_hook(partial(_add_product, self.scale), prepend=True, with_kwargs=True)


def _add_product(
    scale: float, layer: Any, args: Sequence[Tensor], kwargs: Mapping[str, Tensor], output: Tensor
) -> Tensor:
    """Add ``scale B diag(omega) A x`` to the output of a layer, as its forward hook."""
    (x,) = (*args, *kwargs.values())
    hidden = F.linear(x, layer.lora_A) * scale
    if layer.lora_omega is not None:
        hidden = hidden * layer.lora_omega
    return output + F.linear(hidden, layer.lora_B)


def factors_of(layers: Iterable[AdaptedLayer]) -> frozenset[str]:
    """Names of the factors of some layers."""
    return frozenset(name for layer in layers for name in layer.factors.values())


LINEAR = "peft.tuners.lora.layer.Linear"


@dataclass(frozen=True)
class PeftLayer(AdaptedLayer):
    """A linear layer with an active PEFT adapter, which computes and scales the product as PEFT does."""

    brings_factors: ClassVar[bool] = True

    adapter: str = "default"
    rank: int = 8

    @property
    def weight(self) -> str:
        return join(self.name, "base_layer.weight")

    @property
    def parts(self) -> Mapping[str, str]:
        own = {"A": "lora_A.{}.weight", "B": "lora_B.{}.weight", "omega": "lora_A.{}." + OMEGA}
        return {part: join(self.name, name.format(self.adapter)) for part, name in own.items()}

    @property
    def origins(self) -> dict[str, str]:
        return {name: name for name in self.factors.values()}

    def check_rank(self, max_rank: int) -> None:
        if max_rank != self.rank:
            raise ValueError(
                f"The largest `rank` must be that of the adapters which PEFT has made, {self.rank} for {self.name!r}, "
                f"got {max_rank}; clients of smaller rank get some of its terms."
            )
        super().check_rank(max_rank)

    def attach(self, client: nn.Module, rank: int, multiplied: bool) -> None:
        """Cut the factors of a copy of the server's module to a rank; PEFT's scaling stays as it is."""
        layer: Any = client.get_submodule(self.name)
        down, up = layer.lora_A[self.adapter], layer.lora_B[self.adapter]
        down.weight = nn.Parameter(down.weight.new_zeros(rank, self.in_features))
        up.weight = nn.Parameter(up.weight.new_zeros(self.out_features, rank))
        layer.r[self.adapter] = down.out_features = up.in_features = rank
        if multiplied:
            down.register_buffer(OMEGA, down.weight.new_ones(rank))
            down.register_forward_hook(_times_omega)


def _times_omega(down: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    omega: Tensor = down.lora_omega
    return output * omega


def peft_layers(module: nn.Module) -> tuple[PeftLayer, ...]:
    """The layers of a module that have a PEFT adapter, in order of registration; none in a plain module.

    ``ValueError`` names PEFT adapters other than plain LoRA on linear layers: adapters of another kind, variants of
    LoRA, on layers of other types or with quantised weights, several at once, merged or switched off.
    """
    found, reasons = [], []
    for part in module.modules():
        configs = getattr(part, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            # some kinds, such as prompts, have no layers of their own
            kind = str(getattr(config.peft_type, "value", config.peft_type)) if hasattr(config, "peft_type") else "LORA"
            if kind != "LORA" and (reason := f"the model's adapters are of the kind {kind}") not in reasons:
                reasons.append(reason)
    for name, layer in module.named_modules():
        is_peft = any(kind.__module__.startswith("peft.tuners.") for kind in type(layer).__mro__)
        if not is_peft or not hasattr(layer, "adapter_layer_names"):
            continue
        if reason := _why_not_plain(layer):
            reasons.append(f"{name!r} {reason}")
            continue
        (adapter,) = (one for one in layer.active_adapters if one in layer.lora_A)
        rank, in_features = layer.lora_A[adapter].weight.shape
        transposed = sharded_type(layer.base_layer) is SpectralShardedTransposedLinear
        scale, out_features = float(layer.scaling[adapter]), len(layer.lora_B[adapter].weight)
        found.append(PeftLayer(name, out_features, in_features, transposed, scale, adapter, rank))
    if reasons:
        raise ValueError(
            f"LoRA trains adapters of PEFT that are plain LoRA of linear layers, but {'; '.join(reasons[:5])}"
            f"{'; and more' if len(reasons) > 5 else ''}. Train the model as it is with `FedAvg`."
        )
    return tuple(found)


def _why_not_plain(layer: Any) -> str:
    """The reason why a layer of PEFT is not plain LoRA of a linear layer; empty if it is."""
    if (kind := qualified_name(layer)) != LINEAR:
        return f"is a {kind.removeprefix('peft.tuners.')}"
    base = layer.base_layer
    weight = base._parameters.get("weight")
    if sharded_type(base) not in (SpectralShardedLinear, SpectralShardedTransposedLinear) or weight is None:
        return f"adapts a {type(base).__name__}, which may be quantised"
    if not weight.is_floating_point():
        return f"adapts a weight of type {weight.dtype}"
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if len(active) != 1:
        return f"has {len(active)} active adapters"
    if layer.merged or layer.disable_adapters:
        return f"has an adapter that is {'merged' if layer.merged else 'switched off'}"
    if active[0] in getattr(layer, "lora_variant", {}) or layer.use_dora.get(active[0]):
        return "has a variant of LoRA, such as DoRA"
    return ""


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
    if existing := peft_layers(module):
        if left_out := [layer.name for layer in existing if not matches_any(layer.name, patterns)]:
            given = f"{left_out[0]!r}, to which PEFT gave an adapter"
            raise ValueError(f"`layers` leaves out {given}; leave `layers` at '*'.")
        return existing
    owners: dict[int, list[str]] = defaultdict(list)
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            owners[id(parameter)].append(name)
    refused = {name: _why_unable(name, part, owners) for name, part in module.named_modules() if is_affine(part)}
    able = [name for name, reason in refused.items() if not reason and not matches(name, trained)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in able):
            why_not = {name: why or "is trained whole, by `train`" for name, why in refused.items() if name not in able}
            reasons = [f"{name!r} {why}" for name, why in why_not.items() if fnmatchcase(name, pattern)]
            found = f": {'; '.join(reasons[:5])}" if reasons else ""
            remedy = f" Give patterns of names such as {able[0]!r}." if able else ""
            raise ValueError(f"`layers`: {pattern!r} matches no linear layer that can have an adapter{found}.{remedy}")
    layers = []
    for name in able:
        if matches_any(name, patterns):
            layer = module.get_submodule(name)
            transposed = sharded_type(layer) is SpectralShardedTransposedLinear
            rows, columns = layer.get_parameter("weight").shape
            layers.append(AdaptedLayer(name, *((columns, rows) if transposed else (rows, columns)), transposed, scale))
    return tuple(layers)


def _why_unable(name: str, layer: nn.Module, owners: Mapping[int, Sequence[str]]) -> str:
    """The reason why an affine layer cannot have an adapter; empty if it can."""
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


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a dotted name, or the name of a module that contains it.

    Example:
        >>> matches("head.0.weight", ["head"]), matches("head.0.weight", ["*.weight"]), matches("ahead.bias", ["head"])
        (True, True, False)
    """
    return any(matches_any(prefix, patterns) for prefix in accumulate(name.split("."), join))
