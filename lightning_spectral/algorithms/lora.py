"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.adapter_round import AdapterAggregation, OpenAdapter, drawn_rows
from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.lora_checks import (
    check_brought,
    check_holds,
    check_merges,
    check_steps,
    check_trained,
    trained_parts,
)
from lightning_spectral.algorithms.lora_exchange import sent_back, sent_to_all, trained_whole
from lightning_spectral.algorithms.lora_side import LoRASide
from lightning_spectral.algorithms.lora_state import (
    LoRARound,
    LoRAState,
    adapters_of,
    new_adapter,
    own_state,
    restart,
    take_in,
    write_back,
)
from lightning_spectral.algorithms.sampled_terms import SampledTerms
from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields
from lightning_spectral.client.side import ClientSide
from lightning_spectral.errors import check_is
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers, factors_of
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import apply_mean_change, kept_buffers
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_num_entries,
    check_per_client,
    entries_of,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sums import RunningMean

ALPHA = 8.0


@dataclass(frozen=True)
class LoRA(Algorithm[LoRARound]):
    r"""Clients train adapters of linear layers, :math:`W_0 + s B A`, and the rest of the model is frozen.

    The server's module keeps plain weights: after each round they are :math:`W_0 + s B A`. Clients hold the frozen
    :math:`W_0`, which is sent to each of them once, and the factors B, ``(c_out, r)``, initially zero, and A,
    ``(r, c_in)``. Everything else is frozen, except for what ``train`` names, which is averaged as in `FedAvg`.

    If the module already has PEFT adapters, these are trained with PEFT's scaling, and so is everything that PEFT has
    not frozen. R is their rank. Nothing is merged, so the module can be saved in PEFT's format as usual.

    With R the largest rank, all clients have the same :math:`s = \alpha / \sqrt{R}`. So a term means the same to all
    clients that hold it and learns at the same rate: a client's rank is its capacity, not its learning rate. The
    expected first step of SGD on W at full rank, :math:`-\eta s^2 R \sigma^2 G` for entries of A of variance
    :math:`\sigma^2`, is also the same for any R.

    Args:
        rank: Rank r of a client's adapters: one for all; ``{rank: share of clients}``; or one per client. In the ledger
            and logs, a client's keep ratio is its rank divided by R.
        alpha: Numerator of the scale s; ``None`` for 8. It must be ``None`` if PEFT has made the adapters, which have
            their own scale.
        aggregation: How the clients' adapters are combined into one.
        layers: Patterns of the names of linear layers that get an adapter; the ``Conv1D`` of transformers counts as
            one.
        train: Patterns of the names of modules or parameters to train whole, such as heads and norms. Of the buffers
            that match, floating-point ones are averaged, and others keep the server's value. What matches gets no
            adapter.
        keep_buffers: Patterns of the names of buffers that keep the server's value even then.
        merge_every: Number of rounds after which adapters are merged into the base, which is then sent to every client
            again, and restarted: B is zero and A is drawn anew. If that round has no client to average, the merge
            follows the next round that has one. ``None`` for never.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a rank is below 1, shares do not sum to 1, ``alpha`` is not positive, or patterns are not a
            sequence of strings.

    Note:
        :math:`W_0` holds the weights at the start of the first fit; changes made to them later are lost. The server
        keeps the adapted weights in memory twice.

    Reference:
        Hu et al. (2022), LoRA; Kalajdzievski (2023) for the square root.

    Example:
        >>> LoRA({8: 0.6, 16: 0.4}).scale
        2.0
    """

    updates_have_norms: ClassVar[bool] = True

    rank: PerClient[int] = 8
    alpha: float | None = None
    aggregation: AdapterAggregation = field(default_factory=SampledTerms)
    layers: Sequence[str] = ("*",)
    train: Sequence[str] = ()
    keep_buffers: Sequence[str] = ()
    merge_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            rank=partial(check_per_client, rule=Whole(at_least=1)),
            alpha=Number(above=0, optional=True),
            layers=as_patterns,
            train=as_patterns,
            keep_buffers=as_patterns,
            merge_every=Whole(at_least=1, optional=True),
        )
        check_is("aggregation", self.aggregation, AdapterAggregation)
        check_merges(self.aggregation, self.merge_every)

    @property
    def max_rank(self) -> int:
        """The largest rank R of any client."""
        return max(entries_of(self.rank))

    @property
    def is_mixed(self) -> bool:
        """Whether clients have different ranks."""
        return len(set(entries_of(self.rank))) > 1

    @property
    def scale(self) -> float:
        """The factor s on the product B A."""
        return (ALPHA if self.alpha is None else self.alpha) / math.sqrt(self.max_rank)

    def keep_ratios(self, num_clients: int, seed: int) -> Assigned[float]:
        """Rank of every client as a share of the largest: exact shares, drawn from the seed.

        Raises:
            ValueError: If a list of ranks has another length than ``num_clients``.
        """
        check_num_entries("rank", self.rank, num_clients)
        ranks = assign(self.rank, num_clients, seed, "ranks")
        return Assigned(tuple(rank / self.max_rank for rank in ranks.values), ranks.indices)

    def adapted(self, server: nn.Module) -> tuple[AdaptedLayer, ...]:
        """The layers of ``server`` that get an adapter."""
        return adapted_layers(server, self.layers, self.train, self.scale)

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if a pattern matches nothing, a rank is impossible, or PEFT adapters do not fit."""
        layers = self.adapted(server)
        for layer in layers:
            layer.check_rank(self.max_rank)
        check_trained(server, self.train, factors_of(layers))
        if any(layer.brings_factors for layer in layers):
            check_brought(server, layers, self.aggregation, self.alpha, self.merge_every)

    def prepare(self, server: nn.Module) -> LoRA:
        """Decide which buffers keep the server's value, once for all rounds."""
        return replace(self, keep_buffers=kept_buffers(server, self.keep_buffers))

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Raise ``ValueError`` unless the optimizer steps everything that is to be trained."""
        parts = trained_parts(self.aggregation)
        origins = [layer.origins[layer.parts[part]] for layer in self.adapted(server) for part in parts]
        check_holds(template, server, [*dict.fromkeys(origins), *self.trained_whole(server)])

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` for any but plain averaging, if its steps do not set the new factors."""
        check_steps(optimizer, self.aggregation, self.is_mixed, self.merge_every)

    def trained_whole(self, server: nn.Module) -> dict[str, Tensor]:
        """Parameters and averaged buffers that are trained whole: those `train` names and those PEFT has not frozen."""
        return self._trained_whole(server, self.adapted(server))

    def _trained_whole(self, server: nn.Module, layers: Sequence[AdaptedLayer]) -> dict[str, Tensor]:
        return trained_whole(server, layers, self.train, self.keep_buffers)

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half: adapters in place of weights."""
        layers = self.adapted(server)
        dense = tuple(self._trained_whole(server, layers))
        return LoRASide(layers, self.max_rank, self.aggregation, self.is_mixed, dense)

    def initialize(self, server: nn.Module, workers: SharesWork) -> str:
        """Say how much is trained."""
        layers = self.adapted(server)
        adapters = sum(self.max_rank * (layer.out_features + layer.in_features) for layer in layers)
        whole = sum(tensor.numel() for tensor in self.trained_whole(server).values())
        total = sum(parameter.numel() for parameter in server.parameters())
        return (
            f"LoRA: adapters of {len(layers)} layers, of rank up to {self.max_rank}, have {adapters:,} parameters; "
            f"{whole:,} values are trained whole, and the rest of the {total:,} parameters are frozen."
        )

    def start(self, server: nn.Module, seed: int) -> LoRAState:
        """Copy the adapted weights, which become the bases, and draw A; B is zero."""
        layers, steps = self.adapted(server), self.aggregation.steps(self.is_mixed)
        return LoRAState(layers, [new_adapter(server, layer, self.max_rank, seed, steps) for layer in layers], seed)

    def frozen_tensors(self, server: nn.Module, state: nn.Module | None) -> Mapping[str, Tensor]:
        """All that is not trained, and A if the aggregation never changes it and all clients have all of it."""
        layers = own_state(state).layers
        trained, tensors = self._trained_whole(server, layers), sent_to_all(server, layers, adapters_of(state))
        frozen = {name: tensor for name, tensor in tensors.items() if name not in trained}
        parts = () if self.is_mixed else self.aggregation.frozen()
        for layer, adapter in zip(layers, adapters_of(state), strict=True):
            frozen.update({layer.parts[part]: adapter.get_parameter(part).detach() for part in parts})
        return frozen

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> LoRARound:
        """Collect what every client starts from, and open a round of each adapter."""
        layers = own_state(state).layers
        ranks = {ratio: round(ratio * self.max_rank) for ratio in cohort.groups}
        opened = [
            OpenAdapter(layer, adapter.B.detach(), adapter.A.detach(), cohort, ranks, self.is_mixed)
            for layer, adapter in zip(layers, adapters_of(state), strict=True)
        ]
        adapters = dict(zip(layers, self.aggregation.open_all(opened), strict=True))
        mean = dense_mean(server, self._trained_whole(server, layers), cohort)
        return LoRARound(cohort, sent_to_all(server, layers, adapters_of(state)), adapters, mean)

    def send(self, opened: LoRARound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Send the terms that the aggregation chooses, and everything that a client may not have yet."""
        keep_ratio = opened.cohort.keep_ratio_of(unit)
        tensors, terms = dict(opened.tensors), {}
        for layer, adapter in opened.adapters.items():
            terms[layer.name], parts = adapter.draw(unit)
            tensors.update({layer.parts[part]: tensor for part, tensor in parts.items()})
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, opened: LoRARound, receipt: Receipt, upload: Upload) -> None:
        """Add a client's factors, and the change of what it trained whole."""
        opened.dense.add(upload.tensors, receipt.unit.coefficient, upload.largest)
        for layer, adapter in opened.adapters.items():
            adapter.add(receipt.unit, receipt.drawn[layer.name], *sent_back(upload, layer))

    def largest_summand(self, opened: LoRARound, receipt: Receipt, upload: Upload) -> float:
        """The largest of any layer: some aggregations sum products, which may be large where the factors are not."""
        found = (adapter.largest_summand(*sent_back(upload, layer)) for layer, adapter in opened.adapters.items())
        return max(found, default=0.0)

    def running_means(self, opened: LoRARound) -> Sequence[RunningMean]:
        """The sum over what is trained whole, and those of the adapters.

        Raises:
            NotImplementedError: If the aggregation has none.
        """
        return [opened.dense, *(mean for adapter in opened.adapters.values() for mean in adapter.means())]

    def close(self, server: nn.Module, state: nn.Module | None, opened: LoRARound) -> None:
        """Set pseudo-gradients, or new factors, of the state, and pseudo-gradients of what is trained whole."""
        apply_mean_change(server, opened.dense.finish())
        own_state(state).note_round(opened.cohort.round_idx, self.merge_every)
        for adapter, own in zip(opened.adapters.values(), adapters_of(state), strict=True):
            adapter.close(own)

    @torch.no_grad()
    def settle(self, server: nn.Module, state: nn.Module | None) -> None:
        """Write ``W0 + s B A`` or factors into the server's module; before the first round, take over its values."""
        own = own_state(state)
        for layer, adapter in zip(own.layers, adapters_of(state), strict=True):
            if not own.has_begun:
                take_in(server, layer, adapter)
            write_back(server, layer, adapter)
            if own.merge_is_due:
                rows = drawn_rows(layer, self.max_rank, adapter.A, own.seed, int(own.num_rounds))
                restart(adapter, server.get_parameter(layer.weight), rows)
        own.merge_is_due = False
        own.has_begun.fill_(True)
