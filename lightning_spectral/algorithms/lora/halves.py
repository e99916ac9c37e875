"""The two halves of federated LoRA, its rounds, and what the server holds between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.base import Round, ServerHalf
from lightning_spectral.algorithms.fed_avg import dense_mean
from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterAggregation, OpenAdapter, drawn_rows
from lightning_spectral.client.device import ClientSide
from lightning_spectral.nn.adapters import AdaptedLayer, factors_of
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import apply_mean_change, load_tensors, select_tensors, travelling_tensors
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.sums import RunningMean
from lightning_spectral.sums.exact_mean import rows_in_a_block


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

    def initialize(self, workers: Workers) -> str:
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
        keep_ratio = self.cohort.capacity_of(unit)
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


class LoRAState(nn.Module):
    """What the server holds between rounds.

    Attributes:
        layers: The adapted layers, found once for all rounds.
        adapters: One for each of them, in their order.
        has_begun: Whether a fit has begun; until then bases follow the weights, which a user may still load.
        num_rounds: Number of rounds up to the last one that was averaged.
        merge_is_due: Whether adapters are merged and restarted when this round is settled.
    """

    has_begun: Tensor
    num_rounds: Tensor

    def __init__(self, layers: Sequence[AdaptedLayer], adapters: Sequence[Adapter], seed: int) -> None:
        super().__init__()
        self.layers = tuple(layers)
        self.adapters = nn.ModuleList(adapters)
        self.seed = seed
        self.register_buffer("has_begun", torch.tensor(False))
        self.register_buffer("num_rounds", torch.tensor(0))
        self.merge_is_due = False

    @property
    def pairs(self) -> list[tuple[AdaptedLayer, Adapter]]:
        """Each adapted layer with what is held of it."""
        held = [adapter for adapter in self.adapters if isinstance(adapter, Adapter)]
        return list(zip(self.layers, held, strict=True))

    def note_round(self, round_idx: int, merge_every: int | None) -> None:
        """Note an averaged round; a merge is due if this round, or one without clients before it, calls for one."""
        before, now = min(int(self.num_rounds), round_idx), round_idx + 1  # another fit counts from zero again
        self.merge_is_due = merge_every is not None and now // merge_every > before // merge_every
        self.num_rounds.fill_(now)


def new_adapter(server: nn.Module, layer: AdaptedLayer, rank: int, seed: int, steps: Sequence[str]) -> Adapter:
    """What the server holds of a layer before the first round: B zero and A drawn, or the factors that it brings."""
    if layer.brings_factors:
        adapter = Adapter(None, *(server.get_parameter(layer.parts[part]).detach().clone() for part in "BA"))
    else:
        weight = server.get_parameter(layer.weight).detach()
        b = weight.new_zeros(layer.out_features, rank)
        adapter = Adapter(weight.clone(), b, drawn_rows(layer, rank, weight, seed))
    for part in steps:
        adapter.get_parameter(part).requires_grad_(True)
    return adapter


@torch.no_grad()
def adopt(server: nn.Module, layer: AdaptedLayer, adapter: Adapter) -> None:
    """Start from what the server's module holds of a layer: its weight, or the factors it brings."""
    if adapter.base is None:
        load_tensors(adapter, {part: server.get_parameter(name).detach() for part, name in layer.factors.items()})
    else:
        adapter.base.copy_(server.get_parameter(layer.weight))


@torch.no_grad()
def write_back(server: nn.Module, layer: AdaptedLayer, adapter: Adapter) -> None:
    """Write what the server's module holds of a layer between rounds: the merged weight, or the factors it brings.

    This is done in place and block by block, so that a weight is never copied as a whole.
    """
    if adapter.base is not None:
        write_merged(layer, adapter, server.get_parameter(layer.weight))
        return
    for part, name in layer.factors.items():
        server.get_parameter(name).copy_(adapter.get_parameter(part))


@torch.no_grad()
def write_merged(layer: AdaptedLayer, adapter: Adapter, weight: Tensor) -> None:
    """Write ``W0 + s B A``, rounded once from float64, into a weight; exactly W0 where the product is zero."""
    assert adapter.base is not None
    left, right = adapter.B.double(), adapter.A.double()
    if layer.transposed:
        left, right = right.T, left.T
    count = rows_in_a_block(weight)
    parts = (torch.split(whole, count) for whole in (weight, adapter.base, left))
    for into, base, own in zip(*parts, strict=True):
        into.copy_(torch.addmm(base.double(), own, right, alpha=layer.scale))


@torch.no_grad()
def restart(adapter: Adapter, weight: Tensor, rows: Tensor) -> None:
    """Restart from a weight of `write_back`, which becomes the base bit for bit: B is zero again, A is new."""
    assert adapter.base is not None
    adapter.base.copy_(weight)
    adapter.B.zero_()
    adapter.A.copy_(rows)


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
