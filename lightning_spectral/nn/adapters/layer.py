"""A linear layer with a low-rank adapter, and how a device attaches one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        """Name of its weight, without the adapter."""
        return self.tensor("weight")

    def tensor(self, own: str) -> str:
        return f"{self.name}.{own}" if self.name else own

    @property
    def parts(self) -> Mapping[str, str]:
        """Names on a device of its factors ``"A"``, shape ``(r, c_in)``, and ``"B"``, shape ``(c_out, r)``.

        Also of ``"omega"``, the multipliers of its terms, shape ``(r,)``.
        """
        own = {"A": "lora_A", "B": "lora_B", "omega": OMEGA}
        return MappingProxyType({part: self.tensor(name) for part, name in own.items()})

    @property
    def factors(self) -> dict[str, str]:
        return {part: self.parts[part] for part in ("A", "B")}

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
        layer.register_forward_hook(AddProduct(self.scale), prepend=True, with_kwargs=True)


@dataclass(frozen=True)
class AddProduct:
    """A forward hook that adds ``scale B diag(omega) A x`` to the output of a layer."""

    scale: float

    def __call__(self, layer: Any, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor], output: Tensor) -> Tensor:
        """The output of the adapted layer."""
        (x,) = (*args, *kwargs.values())
        hidden = F.linear(x, layer.lora_A) * self.scale
        if layer.lora_omega is not None:
            hidden = hidden * layer.lora_omega
        return output + F.linear(hidden, layer.lora_B)


def factors_of(layers: Iterable[AdaptedLayer]) -> frozenset[str]:
    """Names of the factors of some layers."""
    return frozenset(name for layer in layers for name in layer.factors.values())
