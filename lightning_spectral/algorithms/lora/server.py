"""The server's half of federated LoRA, and its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Round, ServerHalf
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation, OpenAdapter, drawn_rows
from lightning_spectral.algorithms.lora.device import LoRASide
from lightning_spectral.algorithms.lora.state import LoRAState, adopt, restart, write_back
from lightning_spectral.nn.adapters import AdaptedLayer, factors_of
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import apply_mean_change, travelling_tensors
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.sums import RunningMean


class LoRAHalf(ServerHalf):
    """Federated LoRA, bound to a module; ``dense`` names the parameters and buffers that are trained whole."""

    state: LoRAState

    def __init__(
        self,
        server: nn.Module,
        state: LoRAState,
        aggregation: AdapterAggregation,
        *,
        is_mixed: bool,
        max_rank: int,
        merge_every: int | None,
        dense: tuple[str, ...],
        buffers: BufferRules,
    ) -> None:
        super().__init__(server, state, buffers)
        self.aggregation = aggregation
        self.is_mixed = is_mixed
        self.max_rank = max_rank
        self.merge_every = merge_every
        self.dense = dense

    @cached_property
    def device_half(self) -> LoRASide:
        return LoRASide(self.state.layers, self.max_rank, self.aggregation, self.is_mixed, self.dense)

    def initialize(self, workers: SharesWork) -> str:
        layers, whole = self.state.layers, self.trained_whole().values()
        adapters = sum(self.max_rank * (layer.out_features + layer.in_features) for layer in layers)
        total = sum(parameter.numel() for parameter in self.server.parameters())
        return (
            f"LoRA: adapters of {len(layers)} layers, of rank up to {self.max_rank}, have {adapters:,} parameters; "
            f"{sum(tensor.numel() for tensor in whole):,} values are trained whole, and the rest of the {total:,} "
            "parameters are frozen."
        )

    def trained_whole(self) -> dict[str, Tensor]:
        """What is trained beside the factors, as it is now."""
        tensors = travelling_tensors(self.server)
        return {name: tensors[name] for name in self.dense}

    def sent_to_all(self) -> dict[str, Tensor]:
        """What every client is sent: bases in place of adapted weights, and the rest of the module except factors."""
        tensors = travelling_tensors(self.server, without=factors_of(self.state.layers))
        for layer, adapter in self.state.pairs:
            weight = tensors.pop(layer.weight)
            name = layer.folded["base"] if self.folds else layer.weight
            tensors[name] = weight if adapter.base is None else adapter.base.detach()
        return tensors

    @property
    def folds(self) -> bool:
        """Whether clients are also sent the terms that they do not train."""
        return self.is_mixed and self.aggregation.folds

    def frozen_tensors(self) -> Mapping[str, Tensor]:
        """All that is not trained, and A if the aggregation never changes it and all clients have all of it."""
        frozen = {name: tensor for name, tensor in self.sent_to_all().items() if name not in self.dense}
        parts = () if self.is_mixed else self.aggregation.frozen()
        for layer, adapter in self.state.pairs:
            frozen.update({layer.parts[part]: adapter.get_parameter(part).detach() for part in parts})
        return frozen

    @property
    def moving_tensors(self) -> set[str]:
        moves = "base" in self.aggregation.steps(self.is_mixed)
        return {layer.weight for layer in self.state.layers} if moves else set()

    def open(self, cohort: Cohort) -> LoRARound:
        return LoRARound(self, cohort)

    @torch.no_grad()
    def settle(self) -> None:
        """Write ``W0 + s B A`` or factors into the server's module; before the first round, take over its values."""
        state = self.state
        for layer, adapter in state.pairs:
            if not state.has_begun:
                adopt(self.server, layer, adapter)
            write_back(self.server, layer, adapter)
            if state.merge_is_due:
                rows = drawn_rows(layer, self.max_rank, adapter.A, state.seed, int(state.num_rounds))
                restart(adapter, self.server.get_parameter(layer.weight), rows)
        state.merge_is_due = False
        state.has_begun.fill_(True)


class LoRARound(Round):
    """One open round of federated LoRA.

    Attributes:
        tensors: What every client is sent: bases, and all else but factors, by name.
        adapters: The adapted layers with their open rounds.
        dense: Running mean of the changes of what is trained whole.
    """

    def __init__(self, half: LoRAHalf, cohort: Cohort) -> None:
        self.half = half
        self.cohort = cohort
        self.tensors = half.sent_to_all()
        ranks = {ratio: round(ratio * half.max_rank) for ratio in cohort.groups}
        opened = [
            OpenAdapter(layer, adapter.B.detach(), adapter.A.detach(), cohort, ranks, half.is_mixed)
            for layer, adapter in half.state.pairs
        ]
        self.adapters = dict(zip(half.state.layers, half.aggregation.open_all(opened), strict=True))
        self.dense = dense_mean(half.server, half.buffers.averaged(half.trained_whole()), cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.keep_ratio_of(unit)
        tensors, terms = dict(self.tensors), {}
        for layer, adapter in self.adapters.items():
            terms[layer.name], parts = adapter.draw(unit)
            tensors.update({layer.parts[part]: tensor for part, tensor in parts.items()})
            rest = adapter.rest(terms[layer.name]) if self.half.folds else {}
            tensors.update({layer.folded[part]: tensor for part, tensor in rest.items()})
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        self.dense.add(upload.tensors, receipt.unit.coefficient, upload.largest)
        for layer, adapter in self.adapters.items():
            adapter.add(receipt.unit, receipt.drawn[layer.name], *sent_back(upload, layer))

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        """The largest of any layer: some aggregations sum products, which may be large where the factors are not."""
        found = (adapter.largest_summand(*sent_back(upload, layer)) for layer, adapter in self.adapters.items())
        return max(found, default=0.0)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.dense, *(mean for adapter in self.adapters.values() for mean in adapter.means())]

    def close(self) -> None:
        apply_mean_change(self.half.server, self.dense.finish())
        self.half.state.note_round(self.cohort.round_idx, self.half.merge_every)
        for adapter, (_, own) in zip(self.adapters.values(), self.half.state.pairs, strict=True):
            adapter.close(own)


def sent_back(upload: Upload, layer: AdaptedLayer) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The factors of one layer that a client sent back, and the largest magnitude of each."""
    sent = {part: name for part, name in layer.factors.items() if name in upload.tensors}
    tensors = {part: upload.tensors[name] for part, name in sent.items()}
    return tensors, {part: upload.largest[name] for part, name in sent.items()}
