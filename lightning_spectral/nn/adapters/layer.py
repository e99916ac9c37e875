"""Linear layers with a low-rank adapter, and how a device attaches one: a new one, or one that PEFT has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.nn.layers.linear import SpectralShardedLinear, SpectralShardedTransposedLinear
from lightning_spectral.nn.plan.layer_types import qualified_name, sharded_type

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
        return self.tensor("weight")

    def tensor(self, own: str) -> str:
        return f"{self.name}.{own}" if self.name else own

    @property
    def parts(self) -> Mapping[str, str]:
        """Names on a device of its factors ``"A"``, shape ``(r, c_in)``, and ``"B"``, shape ``(c_out, r)``.

        Also of ``"omega"``, the multipliers of its terms, shape ``(r,)``.
        """
        own = {"A": "lora_A", "B": "lora_B", "omega": OMEGA}
        return {part: self.tensor(name) for part, name in own.items()}

    @property
    def factors(self) -> dict[str, str]:
        return {part: self.parts[part] for part in ("A", "B")}

    @property
    def folded(self) -> Mapping[str, str]:
        """Names in a download of the frozen weight, ``"base"``, and of the factors that a device adds to it.

        These are not names of the sub-model, whose weight is their sum.
        """
        return {"base": self.tensor("lora_base"), "A": self.tensor("lora_rest_A"), "B": self.tensor("lora_rest_B")}

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
        return self.tensor("base_layer.weight")

    @property
    def parts(self) -> Mapping[str, str]:
        own = {"A": "lora_A.{}.weight", "B": "lora_B.{}.weight", "omega": "lora_A.{}." + OMEGA}
        return {part: self.tensor(name.format(self.adapter)) for part, name in own.items()}

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
    found = {name: part for name, part in module.named_modules() if _is_tuner(part)}
    reasons = [*_other_kinds(module), *(f"{name!r} {why}" for name, part in found.items() if (why := _refusal(part)))]
    if reasons:
        raise ValueError(
            f"LoRA trains adapters of PEFT that are plain LoRA of linear layers, but {'; '.join(reasons[:5])}"
            f"{'; and more' if len(reasons) > 5 else ''}. Train the model as it is with `FedAvg`."
        )
    return tuple(_described(name, part) for name, part in found.items())


def _is_tuner(part: nn.Module) -> bool:
    is_peft = any(kind.__module__.startswith("peft.tuners.") for kind in type(part).__mro__)
    return is_peft and hasattr(part, "adapter_layer_names")


def _other_kinds(module: nn.Module) -> list[str]:
    """Messages about PEFT models that are not LoRA; some, such as prompts, have no layers of their own."""
    configs = [getattr(part, "peft_config", None) for part in module.modules()]
    names = {
        str(getattr(kind := config.peft_type, "value", kind)): None
        for of_part in configs
        if isinstance(of_part, dict)
        for config in of_part.values()
        if hasattr(config, "peft_type")
    }
    return [f"the model's adapters are of the kind {name}" for name in names if name != "LORA"]


def _refusal(layer: Any) -> str:
    if (kind := qualified_name(layer)) != LINEAR:
        return f"is a {kind.removeprefix('peft.tuners.')}"
    base = layer.base_layer
    weight = base._parameters.get("weight")
    if sharded_type(base) not in (SpectralShardedLinear, SpectralShardedTransposedLinear) or weight is None:
        return f"adapts a {type(base).__name__}, which may be quantised"
    if not weight.is_floating_point():
        return f"adapts a weight of type {weight.dtype}"
    if len(active := _active(layer)) != 1:
        return f"has {len(active)} active adapters"
    if layer.merged or layer.disable_adapters:
        return f"has an adapter that is {'merged' if layer.merged else 'switched off'}"
    if active[0] in getattr(layer, "lora_variant", {}) or layer.use_dora.get(active[0]):
        return "has a variant of LoRA, such as DoRA"
    return ""


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _described(name: str, layer: Any) -> PeftLayer:
    (adapter,) = _active(layer)
    rank, in_features = layer.lora_A[adapter].weight.shape
    return PeftLayer(
        name,
        len(layer.lora_B[adapter].weight),
        in_features,
        sharded_type(layer.base_layer) is SpectralShardedTransposedLinear,
        float(layer.scaling[adapter]),
        adapter,
        rank,
    )
