"""The device half of federated LoRA: frozen layers with adapters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import nn

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.client.side import ClientSide
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.exchange import load_tensors, select_tensors
from lightning_spectral.protocol.records import Download, Upload


@dataclass(frozen=True)
class LoRASide(ClientSide):
    """Sub-models whose chosen layers compute ``W0 x + s B A x``, in which only A and B are trained.

    Attributes:
        layers: The layers with adapters.
        max_rank: Largest rank in the federation; a capacity is a share of it.
        aggregation: Says which factors are trained in a round, and whether terms have multipliers.
        is_mixed: Whether the federation has clients of different ranks; only then are there multipliers.
        dense: Names of the tensors that are trained whole and travel back.
    """

    layers: tuple[AdaptedLayer, ...]
    max_rank: int
    aggregation: AdapterAggregation
    is_mixed: bool
    dense: tuple[str, ...]

    @cached_property
    def _weight_of(self) -> dict[str, str]:
        """Maps each trained parameter to the server's parameter whose optimizer options it gets."""
        factors = [layer.origins for layer in self.layers]
        return {name: origin for part in ({n: n for n in self.dense}, *factors) for name, origin in part.items()}

    def take_form(self, module: nn.Module, capacity: float) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.dense)
        rank, multiplied = round(capacity * self.max_rank), self.is_mixed and self.aggregation.has_multipliers
        for layer in self.layers:
            layer.attach(module, rank, multiplied)

    def load(self, client: nn.Module, download: Download) -> None:
        tensors = dict(download.tensors)
        for layer in self.layers if self.is_mixed and self.aggregation.folds else ():
            layer.fold(tensors)
        load_tensors(client, tensors)
        trained, parameters = self.aggregation.trained(download.round_idx), dict(client.named_parameters())
        for layer in self.layers:
            for part, name in layer.factors.items():
                parameters[name].requires_grad_(part in trained)

    def origin(self, name: str) -> str:
        return self._weight_of.get(name, "")

    def collect(self, client: nn.Module, download: Download) -> Upload:
        parts = self.aggregation.trained(download.round_idx)
        factors = [layer.parts[part] for layer in self.layers for part in parts]
        return Upload(download.unit, select_tensors(client, [*self.dense, *factors]))

    def watched(self, client: nn.Module) -> dict[str, nn.Parameter]:
        own = dict(client.named_parameters())
        pairs = {layer.name: (layer.factors["B"], layer.factors["A"]) for layer in self.layers}
        return {layer: next(own[name] for name in pair if own[name].requires_grad) for layer, pair in pairs.items()}
