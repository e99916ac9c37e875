"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model, which PEFT can read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.base import UNKNOWN, Algorithm, Known, Promises, ServerHalf, Setting
from lightning_spectral.algorithms.capacities import Capacities
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide
from lightning_spectral.algorithms.lora.aggregation import (
    Adapter,
    AdapterAggregation,
    AlternatingFactors,
    FrozenA,
    OpenAdapter,
    OrthonormalA,
    PaddedFactors,
    SampledTerms,
    StackedProducts,
    drawn_rows,
)
from lightning_spectral.algorithms.term_draws import places_of_terms
from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields, each
from lightning_spectral.client.user_optimizer import StandIn
from lightning_spectral.errors import check_is, from_extra
from lightning_spectral.functional.checks import named_by_any
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers, factors_of, matches
from lightning_spectral.nn.cost import CostsBesides
from lightning_spectral.protocol.buffer_rules import BufferRules, buffer_rules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import load_tensors, returned_tensors, select_tensors, travelling_tensors
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_entries,
    check_num_entries,
    entries_of,
)
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import RunningMean, check_summable
from lightning_spectral.sums.exact_mean import rows_in_a_block

ALPHA = 8.0
KEPT = (PaddedFactors, FrozenA, AlternatingFactors)  # whose factors go on from round to round
SUMMED = (SampledTerms, PaddedFactors, FrozenA, AlternatingFactors, OrthonormalA, StackedProducts)
PLAIN = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


@dataclass(frozen=True)
class LoRA(Algorithm):
    r"""Clients train adapters of linear layers, :math:`W_0 + s B A`, and the rest of the model is frozen.

    The server's module keeps plain weights: after each round they are :math:`W_0 + s B A`. Clients hold the frozen
    :math:`W_0`, which is sent to each of them once, and the factors B, ``(c_out, r)``, initially zero, and A,
    ``(r, c_in)``. Everything else is frozen, except for what ``train`` names, which is averaged as in `FedAvg`.

    If the module already has PEFT adapters, these are trained with PEFT's scaling, and so is everything that PEFT has
    not frozen. R is their rank. Nothing is merged, so the module can be saved in PEFT's format as usual.

    With R the largest rank, all clients have the same :math:`s = \alpha / \sqrt{R}`. So a term has the same scale and
    learns at the same rate on all clients that hold it: a client's rank is its capacity, not its learning rate. The
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
        train: Patterns of the names of modules or parameters to train whole, such as heads and norms. Buffers that
            match follow the rules of the federation, as do those that its ``buffers`` name; others keep the server's
            value. What matches gets no adapter.
        merge_every: Number of rounds after which adapters are merged into the base, which is then sent to every client
            again, and restarted: B is zero and A is drawn anew. If that round has no client to average, the merge
            follows the next round that has one. ``None`` for never.

    Note:
        :math:`W_0` holds the weights at the start of the first fit; changes made to them later are lost. The server
        keeps the adapted weights in memory twice.

    Reference:
        Hu et al. (2022), LoRA; Kalajdzievski (2023) for the square root.

    Example:
        >>> LoRA({8: 0.6, 16: 0.4}).scale
        2.0
    """

    rank: PerClient[int] = 8
    alpha: float | None = None
    aggregation: AdapterAggregation = field(default_factory=SampledTerms)
    layers: Sequence[str] = ("*",)
    train: Sequence[str] = ()
    merge_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            rank=partial(check_entries, rule=Whole(at_least=1)),
            alpha=Number(above=0, optional=True),
            layers=as_patterns,
            train=as_patterns,
            merge_every=Whole(at_least=1, optional=True),
        )
        check_is("aggregation", self.aggregation, AdapterAggregation)
        if self.merge_every is not None and "base" in self.aggregation.steps(is_mixed=True):
            raise ValueError(
                f"{type(self.aggregation).__name__} adds to the base in every round and keeps no adapters between "
                f"rounds; leave `merge_every` out, got {self.merge_every}."
            )

    @property
    def promises(self) -> Promises:  # type: ignore[override]
        """Factors mean the same in every round unless they are drawn, merged or factorised anew."""
        kept = isinstance(self.aggregation, KEPT) and not self.is_mixed and not self.merge_every
        summed = type(self.aggregation) in SUMMED and not self.is_mixed
        return Promises(
            new_values=True,
            values_alone=True,
            clients_may_join=True,
            same_tensors=kept,
            noise_hides=summed,
            remedies={
                "same_tensors": "use factors of one rank that are kept, without `merge_every`: "
                "LoRA(8, aggregation=FrozenA())",
                "noise_hides": "use adapters of one rank, which are summed: LoRA(8, aggregation=SampledTerms())",
            },
        )

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

    @property
    def trained_parts(self) -> tuple[str, ...]:
        """The factors that clients train in some round."""
        return tuple(sorted({part for round_idx in (0, 1) for part in self.aggregation.trained(round_idx)}))

    @property
    def changes_base(self) -> bool:
        """Whether a fit changes the base, so that its result is not just an adapter on the weights it started from."""
        return self.merge_every is not None or "base" in self.aggregation.steps(is_mixed=True)

    @property
    def capacities(self) -> Ranks:
        return Ranks(self)

    def adapted(self, server: nn.Module) -> tuple[AdaptedLayer, ...]:
        """The layers of ``server`` that get an adapter."""
        return adapted_layers(server, self.layers, self.train, self.scale)

    def check(self, plan: Setting) -> None:
        """Refuse optimizers that lack what is trained, or whose state would refer to factors that are gone."""
        if not plan.optimizers:
            self._check_module(plan.module)
        for template in plan.optimizers:
            self._check_optimizer(template, plan)
        if plan.server_optimizer is not None:
            self._check_server_optimizer(plan.server_optimizer)

    def _check_module(self, server: nn.Module) -> None:
        """Refuse patterns of ``train`` that match nothing, and adapters of PEFT that could not keep their form."""
        layers, kind = self.adapted(server), type(self.aggregation).__name__
        for layer in layers:
            layer.check_rank(self.max_rank)
        trainable = {name for name, p in server.named_parameters() if p.requires_grad} - factors_of(layers)
        for pattern in self.train:
            if not any(matches(name, [pattern]) for name in trainable):
                raise ValueError(
                    f"`train`: {pattern!r} matches no trainable parameter of {type(server).__name__}; give patterns of "
                    "names of modules or parameters, such as 'head' or '*.bias'."
                )
        if not any(layer.brings_factors for layer in layers):
            return
        if self.alpha is not None:
            raise ValueError(
                f"`alpha` must be None where PEFT has made the adapters, which it scales itself, got {self.alpha}; "
                "give PEFT's `LoraConfig` a `lora_alpha`."
            )
        if self.changes_base:
            what = f"`merge_every={self.merge_every}`" if self.merge_every else kind
            raise ValueError(
                f"{what} changes the base, which is not part of a PEFT adapter; leave it out, or use the module "
                "without PEFT."
            )
        for name in (layer.parts[part] for layer in layers for part in self.trained_parts):
            if not server.get_parameter(name).requires_grad:
                raise ValueError(
                    f"{name} is frozen, and {kind} trains it. Load the adapter with `is_trainable=True`; if A alone is "
                    "frozen, use FrozenA."
                )

    def _check_optimizer(self, template: Optimizer, plan: Setting) -> None:
        """Raise ``ValueError`` unless the user's optimizer holds all that clients train."""
        server, rules = plan.module, buffer_rules(plan.module, plan.buffers)
        layers = self.adapted(server)
        origins = [layer.origins[layer.parts[part]] for layer in layers for part in self.trained_parts]
        held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
        wanted = dict.fromkeys([*origins, *self.whole_of(server, layers, rules)])
        parameters = dict(server.named_parameters())
        if missing := [name for name in wanted if name in parameters and id(parameters[name]) not in held]:
            raise ValueError(
                "LoRA gives an adapter the options of its weight in your optimizer, which lacks "
                f"{', '.join(missing[:3])}{' and more' if len(missing) > 3 else ''}. Give your "
                f"{type(template).__name__} all parameters of the module; what is frozen stays frozen."
            )

    def _check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` for any but plain averaging if the server's factors are replaced between steps."""
        plain = (group[name] == value for group in optimizer.param_groups for name, value in PLAIN.items())
        if isinstance(optimizer, SGD) and all(plain):
            return
        kind = type(optimizer).__name__
        gone = f"the state of a server optimizer such as {kind} would refer to factors that no longer exist"
        if self.merge_every:
            raise ValueError(
                f"With `merge_every={self.merge_every}` adapters restart, and {gone}; leave `server_optimizer` or "
                "`merge_every` out."
            )
        if not self.aggregation.steps(self.is_mixed):
            raise ValueError(
                f"{type(self.aggregation).__name__} factorises its product anew in each round, and {gone}; leave "
                "`server_optimizer` out, or use PaddedFactors, FrozenA, AlternatingFactors or StackedProducts."
            )

    def new_state(self, server: nn.Module, seed: int) -> LoRAState:
        """B is zero and A drawn, unless the layers bring their factors."""
        layers, adapters, rank = self.adapted(server), [], self.max_rank
        for layer in layers:
            if layer.brings_factors:
                own = (server.get_parameter(layer.parts[part]).detach().clone() for part in "BA")
                adapter = Adapter(None, *own)
            else:
                weight = server.get_parameter(layer.weight).detach()
                B, A = weight.new_zeros(layer.out_features, rank), drawn_rows(layer, rank, weight, seed)
                adapter = Adapter(weight.clone(), B, A)
            for part in self.aggregation.steps(self.is_mixed):
                adapter.get_parameter(part).requires_grad_(True)
            adapters.append(adapter)
        return LoRAState(layers, adapters, seed)

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> ServerHalf:
        """Decide what is trained whole; `check` has refused optimizers that leave anything of it out."""
        assert isinstance(state, LoRAState), "made by `new_state`"
        return LoRAHalf(self, server, state, buffer_rules(server) if known.rules is None else known.rules)

    def _trained_buffers(self, server: nn.Module, rules: BufferRules) -> BufferRules:
        """The rules of the buffers that are trained, or about which somebody has said something."""
        return rules.only(rules.asked | {*named_by_any(server, partial(matches, patterns=self.train))})

    def whole_of(self, server: nn.Module, layers: Sequence[AdaptedLayer], rules: BufferRules) -> dict[str, Tensor]:
        """What clients send back beside the factors: parameters by patterns of names, and buffers with a rule.

        If PEFT has made the layers' factors, all that it has not frozen is trained, too.
        """
        rules = self._trained_buffers(server, rules)
        by_peft = any(layer.brings_factors for layer in layers)
        named = {*named_by_any(server, lambda name: by_peft or matches(name, self.train))}
        chosen = (named | rules.returned) - factors_of(layers)
        return {name: t for name, t in returned_tensors(server, buffers=rules).items() if name in chosen}


@dataclass(frozen=True)
class Ranks(Capacities[LoRA]):
    """Clients of LoRA differ by the rank of their adapters."""

    name: ClassVar[str] = "rank"

    def of_clients(self, num_clients: int, seed: int) -> Assigned[float]:
        lora = self.choice
        check_num_entries("rank", lora.rank, num_clients)
        ranks = assign(lora.rank, num_clients, seed, "ranks")
        return Assigned(tuple(rank / lora.max_rank for rank in ranks.values), ranks.indices)

    def choices(self, capacities: Sequence[float]) -> dict[float, tuple[LoRA, float]]:
        ranks = each("capacities", capacities, Whole(at_least=1))
        choice = replace(self.choice, rank=ranks)
        return {rank: (choice, rank / choice.max_rank) for rank in ranks}

    def all_of(self, server: nn.Module) -> range:
        """The ranks up to the smallest side of an adapted layer."""
        layers = self.choice.adapted(server)
        if any(layer.brings_factors for layer in layers):
            raise ValueError("The module has adapters of PEFT, whose rank is their `r`; give the plain module.")
        return range(1, min(min(layer.in_features, layer.out_features) for layer in layers) + 1)

    def counts(self, server: nn.Module) -> Callable[[int], Sequence[int]]:
        ranks = self.all_of(server)
        return lambda place: [ranks[place]]


class LoRAHalf(DenseHalf):
    """Federated LoRA, bound to a module; ``dense`` names the parameters and buffers that are trained whole."""

    def __init__(self, choice: LoRA, server: nn.Module, state: LoRAState, rules: BufferRules) -> None:
        super().__init__(server, choice._trained_buffers(server, rules))
        self.state, self.choice, self.aggregation = state, choice, choice.aggregation
        self.is_mixed, self.max_rank = choice.is_mixed, choice.max_rank
        self.dense = tuple(choice.whole_of(server, state.layers, self.rules))

    @cached_property
    def client_side(self) -> LoRASide:
        return LoRASide(
            returned=self.dense,
            layers=self.state.layers,
            max_rank=self.max_rank,
            aggregation=self.aggregation,
            is_mixed=self.is_mixed,
        )

    def initialize(self, workers: Workers) -> str:
        layers, whole = self.state.layers, self.returned().values()
        adapters = sum(self.max_rank * (layer.out_features + layer.in_features) for layer in layers)
        total = sum(parameter.numel() for parameter in self.server.parameters())
        return (
            f"LoRA: adapters of {len(layers)} layers, of rank up to {self.max_rank}, have {adapters:,} parameters; "
            f"{sum(tensor.numel() for tensor in whole):,} values are trained whole, and the rest of the {total:,} "
            "parameters are frozen."
        )

    def returned(self) -> dict[str, Tensor]:
        """What is trained beside the factors, as it is now."""
        return select_tensors(self.server, self.dense)

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
        parts = () if self.is_mixed else self.aggregation.frozen
        for layer, adapter in self.state.pairs:
            frozen.update({layer.parts[part]: adapter.get_parameter(part).detach() for part in parts})
        return frozen

    @property
    def costs_besides(self) -> CostsBesides:
        """The weights of adapted layers, where the aggregation adds to them in every round."""
        moves = "base" in self.aggregation.steps(self.is_mixed)
        return CostsBesides(sent_again=frozenset(layer.weight for layer in self.state.layers) if moves else frozenset())

    def open(self, cohort: Cohort) -> LoRARound:
        return LoRARound(self, cohort)

    @torch.no_grad()
    def settle(self) -> None:
        """Write ``W0 + s B A`` or factors into the server's module; before the first round, take over its values."""
        state, begins = self.state, not self.state.has_begun
        for layer, adapter in state.pairs:
            if adapter.base is None:
                for part, name in layer.factors.items():
                    whole, own = self.server.get_parameter(name), adapter.get_parameter(part)
                    if begins:
                        own.copy_(whole)
                    whole.copy_(own)
                continue
            weight = self.server.get_parameter(layer.weight)
            if begins:
                adapter.base.copy_(weight)
            write_merged(layer, adapter, weight)
            if state.merge_is_due:  # the merged weight becomes the base bit for bit
                adapter.base.copy_(weight)
                adapter.B.zero_()
                adapter.A.copy_(drawn_rows(layer, self.max_rank, adapter.A, state.seed, int(state.num_rounds)))
        state.merge_is_due = False
        state.has_begun.fill_(True)


class LoRARound(DenseRound):
    """One open round of federated LoRA, in which all clients are sent bases, and all else but factors.

    Attributes:
        adapters: The adapted layers with their open rounds.
    """

    half: LoRAHalf

    def __init__(self, half: LoRAHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        self.tensors = half.sent_to_all()
        ranks = {ratio: round(ratio * half.max_rank) for ratio in cohort.groups}
        given = cohort, ranks, half.is_mixed, half.aggregation.trained(cohort.round_idx)
        opened = [OpenAdapter(layer, own.B.detach(), own.A.detach(), *given) for layer, own in half.state.pairs]
        self.adapters = dict(zip(half.state.layers, half.aggregation.open_all(opened), strict=True))

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
        trained = [(layer, adapter, sent_back(upload, layer)) for layer, adapter in self.adapters.items()]
        # some aggregations sum products, which may be large where the factors are not
        check_summable(*(adapter.largest_summand(*own) for _, adapter, own in trained))
        super().add(receipt, upload)
        for layer, adapter, own in trained:
            adapter.add(receipt.unit, receipt.drawn[layer.name], *own)

    def positions(self, receipt: Receipt) -> dict[str, Tensor]:
        """Where a unit's terms are among all of each adapter."""
        found: dict[str, Tensor] = {}
        for layer, adapter in self.adapters.items():
            own, names = adapter.opened, (layer.factors["B"], layer.factors["A"])
            found |= places_of_terms(receipt.drawn[layer.name], own.B, own.A, *names)
        return found

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, *(adapter.mean for adapter in self.adapters.values())]

    def close(self) -> None:
        super().close()
        state, merge_every = self.half.state, self.half.choice.merge_every
        now = self.cohort.round_idx + 1
        before = min(int(state.num_rounds), self.cohort.round_idx)  # another fit counts from zero again
        # this round calls for it, or one without clients before it
        state.merge_is_due = merge_every is not None and now // merge_every > before // merge_every
        state.num_rounds.fill_(now)
        for adapter, (_, own) in zip(self.adapters.values(), state.pairs, strict=True):
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


@torch.no_grad()
def write_merged(layer: AdaptedLayer, adapter: Adapter, weight: Tensor) -> None:
    """Write ``W0 + s B A``, rounded once from float64, into a weight; exactly W0 where the product is zero.

    This is done in place and block by block, so that a weight is never copied as a whole.
    """
    assert adapter.base is not None
    left, right = adapter.B.double(), adapter.A.double()
    if layer.transposed:
        left, right = right.T, left.T
    count = rows_in_a_block(weight)
    parts = (torch.split(whole, count) for whole in (weight, adapter.base, left))
    for into, base, own in zip(*parts, strict=True):
        into.copy_(torch.addmm(base.double(), own, right, alpha=layer.scale))


@dataclass(frozen=True, kw_only=True)
class LoRASide(DenseSide):
    """Sub-models whose chosen layers compute ``W0 x + s B A x``, in which only A and B are trained.

    What is ``returned`` is trained whole; the factors that are sent back beside it depend on the round.

    Attributes:
        layers: The layers with adapters.
        max_rank: Largest rank in the federation; a capacity is a share of it.
        aggregation: Says which factors are trained in a round, and whether terms have multipliers.
        is_mixed: Whether the federation has clients of different ranks; only then are there multipliers.
    """

    layers: tuple[AdaptedLayer, ...]
    max_rank: int
    aggregation: AdapterAggregation
    is_mixed: bool

    def take_form(self, module: nn.Module, capacity: float) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.returned)
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

    def stand_ins(self, client: nn.Module) -> dict[str, StandIn]:
        """Factors stand for the layer's weight, or for the server's factors; what is not sent back is not trained."""
        found = {name: StandIn("") for name, _ in client.named_parameters() if name not in self.returned}
        for layer in self.layers:
            factors = reversed(layer.origins.items())  # B first: it tells of the layer if both train
            found |= {name: StandIn(origin, layer=layer.name) for name, origin in factors}
        return found

    def collect(self, client: nn.Module, download: Download) -> Upload:
        parts = self.aggregation.trained(download.round_idx)
        names = [*self.returned, *(layer.parts[part] for layer in self.layers for part in parts)]
        return Upload(download.unit, select_tensors(client, names))


PREFIX = "base_model.model."  # of all names in PEFT's files


def save_peft_adapter(model: Any, folder: str | PathLike[str], submodule: str = "") -> None:
    r"""Save what `LoRA` has learned for a plain module in PEFT's format.

    `PeftModel.from_pretrained(base, folder)` then computes the same as the server's module, up to rounding, if ``base``
    has the weights with which the first fit began. The configuration includes rank, alpha and the square root. Layers
    that contain anything named by ``train`` are saved whole, as PEFT's ``modules_to_save``.

    This needs the package ``safetensors``, which comes with PEFT (the ``peft`` extra).

    Args:
        model: The federation, after a fit.
        folder: Where ``adapter_config.json`` and ``adapter_model.safetensors`` are written; created if necessary.
        submodule: Name of the part of your module that PEFT is to adapt, such as ``"net"``; by default all of it.

    Raises:
        ValueError: If the federation has another algorithm; if its module brings adapters of PEFT, which has its own
            ``save_pretrained``; if the aggregation changes the base; or if something that is trained is not part of
            ``submodule``, or cannot be named in PEFT's configuration.

    Example:
        >>> import json, tempfile
        >>> import lightning_spectral as ls
        >>> from lightning_spectral.models import MLP, LitClassifier
        >>> lit = LitClassifier(MLP(6, [8], 3), num_classes=3)
        >>> model = ls.FederatedModule(lit, algorithm=ls.LoRA(2), clients_per_round=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ls.algorithms.save_peft_adapter(model, folder, submodule="model")
        ...     config = json.loads((Path(folder) / "adapter_config.json").read_text())
        >>> config["r"], config["lora_alpha"], config["use_rslora"], config["target_modules"]
        (2, 8.0, True, 'hidden\\.0|head')
    """
    algorithm, server, state = (getattr(model, name, None) for name in ("algorithm", "module", "state"))
    if not (isinstance(algorithm, LoRA) and isinstance(server, nn.Module) and isinstance(state, LoRAState)):
        raise ValueError(f"Only a federation with LoRA has an adapter, got {type(algorithm or model).__name__}.")
    if algorithm.changes_base:
        what = "`merge_every`" if algorithm.merge_every else type(algorithm.aggregation).__name__
        raise ValueError(
            f"{what} changes the base, so that an adapter alone is not what was learned; save the module's "
            "`state_dict`."
        )
    layers = state.layers
    if any(layer.brings_factors for layer in layers):
        raise ValueError("The module brings adapters of PEFT: save it with its own `save_pretrained`.")
    names = dict(_inside(submodule, [layer.name for layer in layers]))
    rules = buffer_rules(server, getattr(model, "buffer_rules", None))
    whole = _modules(server, submodule, algorithm.whole_of(server, layers, rules), layers)
    part = server.get_submodule(submodule)
    tensors = {f"{module}.{n}": t for module in whole for n, t in part.get_submodule(module).state_dict().items()}
    for layer, adapter in state.pairs:
        for factor in ("A", "B"):
            tensors[f"{names[layer.name]}.lora_{factor}.weight"] = adapter.get_parameter(factor)
    config = {
        "r": algorithm.max_rank,
        "lora_alpha": ALPHA if algorithm.alpha is None else algorithm.alpha,
        "peft_type": "LORA",
        "use_rslora": True,
        "target_modules": "|".join(map(re.escape, names.values())),  # a pattern, which PEFT matches with whole names
        "fan_in_fan_out": any(layer.transposed for layer in layers),
        "modules_to_save": whole or None,
        "inference_mode": True,
    }
    with from_extra("peft"):
        from safetensors.torch import save_file

    (folder := Path(folder)).mkdir(parents=True, exist_ok=True)
    values = {PREFIX + name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _inside(submodule: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield names, each with its form inside the submodule."""
    prefix = f"{submodule}." if submodule else ""
    for name in names:
        if not name.startswith(prefix):
            raise ValueError(
                f"`submodule`: {name!r} is trained but not part of {submodule!r}; give a module that contains all that "
                "is trained, and narrow it with `layers` and `train`."
            )
        yield name, name.removeprefix(prefix)


def _modules(server: nn.Module, submodule: str, trained: Tensors, layers: Sequence[AdaptedLayer]) -> list[str]:
    """The modules that PEFT is to save whole, by their names inside the submodule.

    PEFT finds them by the end of their names and wraps them, so none may be or contain an adapted layer.
    """
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
    found = [inside for _, inside in _inside(submodule, owners)]
    known = [name for name, _ in server.get_submodule(submodule).named_modules()]
    for name, inside in zip(owners, found, strict=True):
        like = [other for other in known if other.endswith(inside) and other != inside]
        adapted = [layer.name for layer in layers if f"{layer.name}.".startswith(f"{name}.")]
        if like or adapted:
            why = f"{adapted[0]!r} has an adapter" if adapted else f"PEFT would take {like[0]!r} for it, too"
            raise ValueError(
                f"PEFT cannot save {name!r} whole, of which `train` names tensors, since {why}. Save the module's "
                "`state_dict`."
            )
    return found
