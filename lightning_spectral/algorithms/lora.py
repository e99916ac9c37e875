"""Federated LoRA: clients train low-rank adapters of different ranks on a frozen model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.adapter_round import (
    Adapter,
    AdapterAggregation,
    AdapterRound,
    OpenAdapter,
    drawn_rows,
)
from lightning_spectral.algorithms.base import Algorithm
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.lora_side import TENSOR_OF, LoRASide
from lightning_spectral.algorithms.lora_state import LoRARound, LoRAState, adapters_of, merged, own_state
from lightning_spectral.algorithms.sampled_terms import SampledTerms
from lightning_spectral.arguments import Number, Whole, as_patterns, check_fields
from lightning_spectral.client.side import ClientSide
from lightning_spectral.errors import check_is
from lightning_spectral.nn.adapters import AdaptedLayer, adapted_layers, matches
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    kept_buffers,
    load_tensors,
    travelling_tensors,
)
from lightning_spectral.protocol.per_client import (
    Assigned,
    PerClient,
    assign,
    check_num_entries,
    check_per_client,
    entries_of,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.statistics import RunningMean
from lightning_spectral.protocol.work_unit import WorkUnit

PLAIN = {"lr": 1.0, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "maximize": False}


@dataclass(frozen=True)
class LoRA(Algorithm[LoRARound]):
    r"""Clients train adapters of linear layers, :math:`W_0 + s B A`, and the rest of the model is frozen.

    The server's module keeps plain weights: after each round they are :math:`W_0 + s B A`. Clients hold frozen
    :math:`W_0`, which travels to each once, and the factors B, ``(c_out, r)``, zero at first, and A, ``(r, c_in)``.
    Everything else is frozen, but for what ``train`` names: that is averaged as in `FedAvg`.

    With R the largest rank, everybody has the same :math:`s = \alpha / \sqrt{R}`. So a term means the same to all who
    hold it and learns at the same rate: the rank of a client is its capacity, not its learning rate. And the expected
    first step of SGD on W at full rank, :math:`-\eta s^2 R \sigma^2 G` for the variance :math:`\sigma^2` of A, is the
    same for any R.

    Args:
        rank: Rank r of a client's adapters: one for all; ``{rank: share of clients}``; or one per client. A client's
            keep ratio, in ledger and logs, is its rank over R.
        alpha: Numerator of the scale s.
        aggregation: How adapters of many clients become one.
        layers: Patterns of the linear layers that get an adapter; the ``Conv1D`` of transformers is one, too.
        train: Patterns of what is trained whole, such as heads and norms: names of modules or of parameters. Floating-
            point buffers among it are averaged, others keep the server's value. What it names gets no adapter.
        keep_buffers: Patterns of buffers that keep the server's value even so.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a rank is below 1, shares do not sum to 1, ``alpha`` is not positive, or patterns are not a
            sequence of strings.

    Note:
        :math:`W_0` is what the weights are when the first fit begins, and what is written into them later is lost. The
        server needs the memory of the adapted weights twice.

    Reference:
        Hu et al. (2022), LoRA; Kalajdzievski (2023) for the square root.

    Example:
        >>> LoRA({8: 0.6, 16: 0.4}).scale
        2.0
    """

    rank: PerClient[int] = 8
    alpha: float = 8.0
    aggregation: AdapterAggregation = field(default_factory=SampledTerms)
    layers: Sequence[str] = ("*",)
    train: Sequence[str] = ()
    keep_buffers: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_fields(
            self,
            rank=partial(check_per_client, rule=Whole(at_least=1)),
            alpha=Number(above=0),
            layers=as_patterns,
            train=as_patterns,
            keep_buffers=as_patterns,
        )
        check_is("aggregation", self.aggregation, AdapterAggregation)

    @property
    def max_rank(self) -> int:
        """The largest rank R of any client."""
        return max(entries_of(self.rank))

    @property
    def is_mixed(self) -> bool:
        """Whether there are clients of different ranks."""
        return len(set(entries_of(self.rank))) > 1

    @property
    def scale(self) -> float:
        """Factor s on the product of the factors."""
        return self.alpha / math.sqrt(self.max_rank)

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
        return adapted_layers(server, self.layers, self.train)

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if a pattern matches nothing, or a rank is above that of a layer."""
        for layer in self.adapted(server):
            if self.max_rank > (most := min(layer.out_features, layer.in_features)):
                raise ValueError(
                    f"`rank` must be at most {most} for the layer {layer.name!r}, which has {layer.in_features} inputs "
                    f"and {layer.out_features} outputs, got {self.max_rank}; lower it, or leave the layer out by "
                    "`layers`, or train it whole by `train`."
                )
        names = [name for name, parameter in server.named_parameters() if parameter.requires_grad]
        for pattern in self.train:
            if not any(matches(name, [pattern]) for name in names):
                raise ValueError(
                    f"`train`: {pattern!r} matches no trainable parameter of {type(server).__name__}; give patterns of "
                    "names of modules or parameters, such as 'head' or '*.bias'."
                )

    def prepare(self, server: nn.Module) -> LoRA:
        """Decide which buffers keep the server's value, once for all rounds."""
        return replace(self, keep_buffers=kept_buffers(server, self.keep_buffers))

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Raise ``ValueError`` unless the optimizer steps everything that is to be trained."""
        held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
        wanted = [*(layer.weight for layer in self.adapted(server)), *self._trained(server)]
        parameters = dict(server.named_parameters())
        if missing := [name for name in wanted if name in parameters and id(parameters[name]) not in held]:
            raise ValueError(
                "LoRA gives an adapter the options of its weight in your optimizer, which lacks "
                f"{', '.join(missing[:3])}"
                f"{' and more' if len(missing) > 3 else ''}. Give your {type(template).__name__} all parameters of the "
                "module; what is frozen stays frozen."
            )

    def check_server_optimizer(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` for any but plain averaging, if the aggregation sets new factors."""
        plain = isinstance(optimizer, SGD) and all(
            group[name] == value for group in optimizer.param_groups for name, value in PLAIN.items()
        )
        if not self.aggregation.steps(self.is_mixed) and not plain:
            raise ValueError(
                f"{type(self.aggregation).__name__} factorises its product anew in each round, so that a server "
                f"optimizer such as {type(optimizer).__name__} would step along terms that are gone; leave "
                "`server_optimizer` out, or take PaddedFactors, FrozenA, AlternatingFactors or StackedProducts."
            )

    def _trained(self, server: nn.Module) -> dict[str, Tensor]:
        """What is trained whole: parameters and averaged buffers that `train` names."""
        averaged = averaged_tensors(server, keep_buffers=self.keep_buffers)
        return {name: tensor for name, tensor in averaged.items() if matches(name, self.train)}

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half: adapters in the place of weights."""
        layers, dense = self.adapted(server), tuple(self._trained(server))
        return LoRASide(layers, self.max_rank, self.scale, self.aggregation, self.is_mixed, dense)

    def initialize(self, server: nn.Module, workers: SharesWork) -> str:
        """Say how much is trained."""
        layers = self.adapted(server)
        adapters = sum(self.max_rank * (layer.out_features + layer.in_features) for layer in layers)
        whole = sum(tensor.numel() for tensor in self._trained(server).values())
        total = sum(parameter.numel() for parameter in server.parameters())
        return (
            f"LoRA: adapters of {len(layers)} layers, of rank up to {self.max_rank}, have {adapters:,} parameters; "
            f"{whole:,} values are trained whole, and the other of {total:,} parameters are frozen."
        )

    def start(self, server: nn.Module, seed: int) -> LoRAState:
        """Copy the adapted weights, which become the bases, and draw A; B is zero."""
        return LoRAState([self._adapter(server, layer, seed) for layer in self.adapted(server)])

    def _adapter(self, server: nn.Module, layer: AdaptedLayer, seed: int) -> Adapter:
        weight = server.get_parameter(layer.weight).detach()
        B = weight.new_zeros(layer.out_features, self.max_rank)
        adapter = Adapter(weight.clone(), B, drawn_rows(layer, self.max_rank, weight, seed))
        for name in self.aggregation.steps(self.is_mixed):
            adapter.get_parameter(name).requires_grad_(True)
        return adapter

    def frozen_tensors(self, server: nn.Module, state: nn.Module | None) -> Mapping[str, Tensor]:
        """All that is not trained; A, too, if the aggregation never changes it and everybody has all of it."""
        trained = self._trained(server)
        frozen = {name: tensor for name, tensor in self._tensors(server, state).items() if name not in trained}
        parts = () if self.is_mixed else self.aggregation.frozen()
        for layer, adapter in zip(self.adapted(server), adapters_of(state), strict=True):
            frozen.update({layer.tensor(TENSOR_OF[part]): adapter.get_parameter(part).detach() for part in parts})
        return frozen

    def _tensors(self, server: nn.Module, state: nn.Module | None) -> dict[str, Tensor]:
        """What every client is sent: bases in the place of adapted weights, and the rest of the module."""
        layers = zip(self.adapted(server), adapters_of(state), strict=True)
        return {**travelling_tensors(server), **{layer.weight: adapter.base.detach() for layer, adapter in layers}}

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> LoRARound:
        """Collect what every client starts from, and open a round of each adapter."""
        ranks = {ratio: round(ratio * self.max_rank) for ratio in cohort.groups}
        adapters: dict[AdaptedLayer, AdapterRound] = {}
        for layer, adapter in zip(self.adapted(server), adapters_of(state), strict=True):
            b, a = adapter.B.detach(), adapter.A.detach()
            adapters[layer] = self.aggregation.open(OpenAdapter(layer, b, a, self.scale, cohort, ranks, self.is_mixed))
        mean = dense_mean(server, self._trained(server), cohort)
        return LoRARound(cohort, self._tensors(server, state), adapters, mean)

    def send(self, opened: LoRARound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Send the terms that the aggregation chooses, with all that a client may not have yet."""
        keep_ratio = opened.cohort.keep_ratio_of(unit)
        tensors, terms = dict(opened.tensors), {}
        for layer, adapter in opened.adapters.items():
            terms[layer.name], parts = adapter.draw(unit)
            tensors.update({layer.tensor(TENSOR_OF[part]): tensor for part, tensor in parts.items()})
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, opened: LoRARound, receipt: Receipt, upload: Upload) -> None:
        """Add a client's factors, and the change of what it trained whole."""
        opened.dense.add(upload.tensors, receipt.unit.coefficient, upload.largest)
        for layer, adapter in opened.adapters.items():
            names = {part: layer.tensor(own) for part, own in TENSOR_OF.items() if part != "omega"}
            sent = {part: name for part, name in names.items() if name in upload.tensors}
            parts = {part: upload.tensors[name] for part, name in sent.items()}
            largest = {part: upload.largest[name] for part, name in sent.items()}
            adapter.add(receipt.unit, receipt.drawn[layer.name], parts, largest)

    def running_means(self, opened: LoRARound) -> Sequence[RunningMean]:
        """The sum over what is trained whole, and those of the adapters.

        Raises:
            NotImplementedError: If the aggregation has none.
        """
        return [opened.dense, *(mean for adapter in opened.adapters.values() for mean in adapter.means())]

    def close(self, server: nn.Module, state: nn.Module | None, opened: LoRARound) -> None:
        """Set pseudo-gradients, or new factors, of the state, and pseudo-gradients of what is trained whole."""
        apply_mean_change(server, opened.dense.finish())
        for adapter, own in zip(opened.adapters.values(), adapters_of(state), strict=True):
            adapter.close(own)

    @torch.no_grad()
    def settle(self, server: nn.Module, state: nn.Module | None) -> None:
        """Write ``W0 + s B A`` into the server's module; before the first round, take W0 from there."""
        begun = own_state(state).has_begun
        for layer, adapter in zip(self.adapted(server), adapters_of(state), strict=True):
            if not begun:
                adapter.base.copy_(server.get_parameter(layer.weight))
            load_tensors(server, {layer.weight: merged(layer, adapter, self.scale)})
        begun.fill_(True)
