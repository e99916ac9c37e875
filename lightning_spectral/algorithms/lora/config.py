"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.base import Algorithm, ServerHalf
from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.halves import LoRAHalf, LoRAState, new_adapter
from lightning_spectral.algorithms.lora.terms import SampledTerms
from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields, each, first_match
from lightning_spectral.errors import check_is
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers, factors_of, matches
from lightning_spectral.protocol.buffer_rules import BufferRules, Rules, as_rules, buffer_rules
from lightning_spectral.protocol.exchange import returned_tensors
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_num_entries,
    check_per_client,
    entries_of,
)

ALPHA = 8.0
PLAIN = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


@dataclass(frozen=True)
class LoRA(Algorithm):
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
        train: Patterns of the names of modules or parameters to train whole, such as heads and norms. Buffers that
            match follow the rules of `FedAvg`; others keep the server's value. What matches gets no adapter.
        buffers: Rules for buffers by patterns of their names, as in `FedAvg`, whether ``train`` matches them or not.
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

    updates_have_norms: ClassVar[bool] = True

    capacity_name: ClassVar[str] = "rank"

    rank: PerClient[int] = 8
    alpha: float | None = None
    aggregation: AdapterAggregation = field(default_factory=SampledTerms)
    layers: Sequence[str] = ("*",)
    train: Sequence[str] = ()
    buffers: Rules = field(default_factory=dict)
    merge_every: int | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            rank=partial(check_per_client, rule=Whole(at_least=1)),
            alpha=Number(above=0, optional=True),
            layers=as_patterns,
            train=as_patterns,
            buffers=as_rules,
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

    def capacities(self, num_clients: int, seed: int) -> Assigned[float]:
        check_num_entries("rank", self.rank, num_clients)
        ranks = assign(self.rank, num_clients, seed, "ranks")
        return Assigned(tuple(rank / self.max_rank for rank in ranks.values), ranks.indices)

    def with_capacities(self, capacities: Sequence[float]) -> dict[float, tuple[LoRA, float]]:
        ranks = each("capacities", capacities, Whole(at_least=1))
        choice = replace(self, rank=ranks)
        return {rank: (choice, rank / choice.max_rank) for rank in ranks}

    def all_capacities(self, server: nn.Module) -> range:
        """The ranks up to the smallest side of an adapted layer."""
        layers = self.adapted(server)
        if any(layer.brings_factors for layer in layers):
            raise ValueError("The module has adapters of PEFT, whose rank is their `r`; give the plain module.")
        return range(1, min(min(layer.in_features, layer.out_features) for layer in layers) + 1)

    def adapted(self, server: nn.Module) -> tuple[AdaptedLayer, ...]:
        """The layers of ``server`` that get an adapter."""
        return adapted_layers(server, self.layers, self.train, self.scale)

    def check(self, server: nn.Module) -> None:
        layers = self.adapted(server)
        for layer in layers:
            layer.check_rank(self.max_rank)
        check_trained(server, self.train, factors_of(layers))
        if any(layer.brings_factors for layer in layers):
            check_peft_adapters(server, layers, self.aggregation, self.alpha, self.merge_every)

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        layers, parts = self.adapted(server), trained_parts(self.aggregation)
        origins = [layer.origins[layer.parts[part]] for layer in layers for part in parts]
        whole = self.whole_of(server, layers)
        check_holds(template, server, [*dict.fromkeys(origins), *whole])

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        check_steps(optimizer, self.aggregation, self.is_mixed, self.merge_every)

    def new_state(self, server: nn.Module, seed: int) -> LoRAState:
        layers, steps = self.adapted(server), self.aggregation.steps(self.is_mixed)
        return LoRAState(layers, [new_adapter(server, layer, self.max_rank, seed, steps) for layer in layers], seed)

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> ServerHalf:
        """Decide what is trained whole; `check_optimizer` has refused optimizers that leave anything of it out."""
        assert isinstance(state, LoRAState), "made by `new_state`"
        buffers = self._buffer_rules(server, decisions)
        dense = tuple(trained_whole(server, state.layers, self.train, buffers))
        return LoRAHalf(
            server,
            state,
            self.aggregation,
            is_mixed=self.is_mixed,
            max_rank=self.max_rank,
            merge_every=self.merge_every,
            dense=dense,
            buffers=buffers,
        )

    def _buffer_rules(self, server: nn.Module, decisions: Mapping[str, Any] | None = None) -> BufferRules:
        named = (name for name, _ in server.named_buffers())
        chosen = frozenset(
            name for name in named if matches(name, self.train) or first_match(name, self.buffers) is not None
        )
        return buffer_rules(server, self.buffers, decisions).only(chosen)

    def whole_of(self, server: nn.Module, layers: Sequence[AdaptedLayer]) -> dict[str, Tensor]:
        """What clients train whole, by name."""
        return trained_whole(server, layers, self.train, self._buffer_rules(server))


def check_trained(server: nn.Module, patterns: Sequence[str], factors: Collection[str]) -> None:
    """Raise ``ValueError`` if a pattern of `train` matches nothing that can be trained whole, as factors cannot."""
    names = [name for name, p in server.named_parameters() if p.requires_grad and name not in factors]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ValueError(
                f"`train`: {pattern!r} matches no trainable parameter of {type(server).__name__}; give patterns of "
                "names of modules or parameters, such as 'head' or '*.bias'."
            )


def check_merges(aggregation: AdapterAggregation, merge_every: int | None) -> None:
    """Raise ``ValueError`` if adapters are to be merged by an aggregation that keeps none between rounds."""
    if merge_every is not None and "base" in aggregation.steps(is_mixed=True):
        raise ValueError(
            f"{type(aggregation).__name__} adds to the base in every round and keeps no adapters between rounds; leave "
            f"`merge_every` out, got {merge_every}."
        )


def check_peft_adapters(
    server: nn.Module,
    layers: Sequence[AdaptedLayer],
    aggregation: AdapterAggregation,
    alpha: float | None,
    merge_every: int | None,
) -> None:
    """Raise ``ValueError`` if the adapters that PEFT has made could not keep their form."""
    if alpha is not None:
        raise ValueError(
            f"`alpha` must be None where PEFT has made the adapters, which it scales itself, got {alpha}; give PEFT's "
            "`LoraConfig` a `lora_alpha`."
        )
    if changes_base(aggregation, merge_every):
        what = f"`merge_every={merge_every}`" if merge_every else type(aggregation).__name__
        raise ValueError(
            f"{what} changes the base, which is no part of an adapter of PEFT; leave it out, or take the module "
            "without PEFT."
        )
    for name in (layer.parts[part] for layer in layers for part in trained_parts(aggregation)):
        if not server.get_parameter(name).requires_grad:
            raise ValueError(
                f"{name} is frozen, and {type(aggregation).__name__} trains it. Load the adapter with "
                "`is_trainable=True`; if A alone is frozen, take FrozenA."
            )


def check_holds(template: Optimizer, server: nn.Module, wanted: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the user's optimizer holds all parameters among the given names."""
    held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
    parameters = dict(server.named_parameters())
    if missing := [name for name in wanted if name in parameters and id(parameters[name]) not in held]:
        raise ValueError(
            "LoRA gives an adapter the options of its weight in your optimizer, which lacks "
            f"{', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}. Give your {type(template).__name__} all parameters of the "
            "module; what is frozen stays frozen."
        )


def check_steps(optimizer: Optimizer, aggregation: AdapterAggregation, is_mixed: bool, merge_every: int | None) -> None:
    """Raise ``ValueError`` for any server optimizer but plain averaging if its steps do not set the new factors."""
    plain = isinstance(optimizer, SGD) and all(
        group[name] == value for group in optimizer.param_groups for name, value in PLAIN.items()
    )
    if merge_every and not plain:
        raise ValueError(
            f"With `merge_every={merge_every}` adapters restart, and the state of a server optimizer such as "
            f"{type(optimizer).__name__} would refer to factors that no longer exist; leave `server_optimizer` or "
            "`merge_every` out."
        )
    if not aggregation.steps(is_mixed) and not plain:
        raise ValueError(
            f"{type(aggregation).__name__} factorises its product anew in each round, and the state of a server "
            f"optimizer such as {type(optimizer).__name__} would refer to factors that no longer exist; leave "
            "`server_optimizer` out, or take PaddedFactors, FrozenA, AlternatingFactors or StackedProducts."
        )


def trained_parts(aggregation: AdapterAggregation) -> tuple[str, ...]:
    """The factors that clients train in some round."""
    return tuple(sorted({part for round_idx in (0, 1) for part in aggregation.trained(round_idx)}))


def changes_base(aggregation: AdapterAggregation, merge_every: int | None) -> bool:
    """Whether a fit changes the base, so that its result is not just an adapter on the weights it started from."""
    return merge_every is not None or "base" in aggregation.steps(is_mixed=True)


def trained_whole(
    server: nn.Module, layers: Sequence[AdaptedLayer], train: Sequence[str], buffers: BufferRules
) -> dict[str, Tensor]:
    """What clients send back beside the factors: parameters by patterns of their names, and buffers with a rule.

    If PEFT has made the layers' factors, all that it has not frozen is trained, too.
    """
    by_peft = any(layer.brings_factors for layer in layers)
    factors, returned = factors_of(layers), returned_tensors(server, buffers=buffers)
    chosen = {name for name, _ in server.named_parameters() if by_peft or matches(name, train)} | buffers.returned
    return {name: tensor for name, tensor in returned.items() if name in chosen - factors}
