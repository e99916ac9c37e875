"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.base import Algorithm, ServerHalf
from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation
from lightning_spectral.algorithms.lora.checks import (
    check_holds,
    check_merges,
    check_peft_adapters,
    check_steps,
    check_trained,
    trained_parts,
    trained_whole,
)
from lightning_spectral.algorithms.lora.sampled_terms import SampledTerms
from lightning_spectral.algorithms.lora.server import LoRAHalf
from lightning_spectral.algorithms.lora.state import LoRAState, new_adapter
from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields, each, first_match
from lightning_spectral.errors import check_is
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers, factors_of, matches
from lightning_spectral.protocol.buffer_rules import BufferRules, Rules, as_rules, buffer_rules
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_num_entries,
    check_per_client,
    entries_of,
)

ALPHA = 8.0


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
    capacity_is_shared: ClassVar[bool] = False

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

    def keep_ratios(self, num_clients: int, seed: int) -> Assigned[float]:
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
