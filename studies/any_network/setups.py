"""The setups that are compared: each is an algorithm at a keep ratio, and possibly a server optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from fading import FadingTerms
from torch import nn

import lightning_spectral as ls

START = ls.algorithms.SpectralStart()
MIXED = {0.2: 0.6, 0.4: 0.4}  # keep ratio: share of clients
KeepRatio = float | str  # a share of the terms, or "mixed"
PLAIN = {"server_momentum": 0.0, "aggregation": ls.algorithms.TermMeans()}  # unless a setup says otherwise
EXAMPLES = torch.zeros(2, 1, 14, 14)  # inputs of the networks
Ratios = float | Mapping[float, float]


@dataclass(frozen=True)
class Setup:
    """One row of the study.

    Attributes:
        strategy: Strategy of spectral sharding; ``None`` for federated averaging or another system.
        options: Further options of `SpectralSharding`.
        start: The spectral start; ``None`` for none.
        momentum: Momentum of the server optimizer.
        bounded: Its momentum, if its steps are bounded.
        fading: Share that terms lose in a round in which no client holds them.
        dense_rounds: Number of first rounds in which clients train the whole model; a multiple of the rounds between
            evaluations.
        estimated: Whether BatchNorm's averages are estimated on all training data before each evaluation.
        system: Makes the algorithm of another system from keep ratios and the module.
    """

    strategy: ls.sharding.ShardingStrategy | ls.Schedule[ls.sharding.ShardingStrategy] | None
    options: tuple[tuple[str, Any], ...] = ()
    start: ls.algorithms.SpectralStart | None = None
    momentum: float = 0.0
    bounded: float = 0.0
    fading: float = 0.0
    dense_rounds: int = 0
    estimated: bool = False
    system: Callable[[Ratios, nn.Module], ls.Algorithm] | None = None

    def algorithm(self, keep_ratio: KeepRatio, module: nn.Module) -> ls.Algorithm:
        """Return the algorithm at one keep ratio, for one module."""
        ratio = MIXED if keep_ratio == "mixed" else keep_ratio
        if self.system is not None:
            return self.system(ratio, module)
        if self.strategy is None:
            return ls.FedAvg()
        given = {**PLAIN, "spectral_start": self.start, **dict(self.options)}
        if self.fading:
            given["aggregation"] = FadingTerms(self.fading)
        return ls.SpectralSharding(self.strategy, ratio, **given)

    @property
    def server_optimizer(self) -> Callable[[Any], torch.optim.Optimizer] | None:
        """The server optimizer; ``None`` for that of the algorithm."""
        if self.bounded:
            return ls.server.BoundedMomentum(momentum=self.bounded)
        return ls.server.FedAvgM(lr=1.0, momentum=self.momentum) if self.momentum else None


def options(**values: Any) -> tuple[tuple[str, Any], ...]:
    """Return options of `SpectralSharding` as an immutable value."""
    return tuple(values.items())


def each(ratios: Ratios, change: Callable[[float], float]) -> Ratios:
    """Change each keep ratio, with the same shares of clients."""
    if isinstance(ratios, Mapping):
        return {change(ratio): share for ratio, share in ratios.items()}
    return change(ratios)


def by_width(channels: ls.sharding.ChannelChoice, **options: Any) -> Callable[[Ratios, nn.Module], ls.Algorithm]:
    """Sub-models whose share of the channels is the square root of the keep ratio, to match its share of parameters."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        plan = ls.nn.width_plan(module, EXAMPLES)
        return ls.WidthSharding(channels, each(ratios, math.sqrt), plan=plan, **options)

    return make


def by_drawn_width(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """FjORD: the first channels; some steps use fewer of them, down to half of what the smallest clients have."""
    widths = each(ratios, math.sqrt)
    all_widths = list(widths) if isinstance(widths, Mapping) else [widths]
    plan = ls.nn.width_plan(module, EXAMPLES)
    return ls.WidthSharding(keep_ratio=widths, plan=plan, step_widths=[min(all_widths) / 2, *all_widths])


def at_equal(budget: str, need: str) -> Callable[[Ratios, nn.Module], ls.Algorithm]:
    """The first channels, as many as cost no more than the terms of the same keep ratio."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        algorithm = ls.WidthSharding(plan=ls.nn.width_plan(module, EXAMPLES))

        def width_of(ratio: float) -> float:
            limit: Any = {
                budget: getattr(ls.cost_table(module, ls.SpectralSharding(), [ratio], EXAMPLES).at[ratio], need)
            }
            width = ls.largest_that_fits(module, algorithm, EXAMPLES, **limit)
            assert isinstance(width, float), "one budget, one answer"
            return width

        return replace(algorithm, keep_ratio=each(ratios, width_of))

    return make


def by_matrices(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """FedHM: the first terms, and the mean of the matrices."""
    return ls.SpectralSharding.published(ls.TopN(), ratios, aggregation=ls.algorithms.MatrixMeans())


def by_cut_outputs(factor: float) -> Callable[[Ratios, nn.Module], ls.Algorithm]:
    """PriSM's memory-efficient sub-models: they also cut the outputs, to ``factor`` times the smallest keep ratio."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        smallest = min(ratios) if isinstance(ratios, Mapping) else ratios
        return ls.SpectralSharding.published(ls.PriSM(), ratios, output_ratio=factor * smallest)

    return make


def by_updates(
    aggregation: ls.algorithms.AdapterAggregation, **options: Any
) -> Callable[[Ratios, nn.Module], ls.Algorithm]:
    """FedMUD: updates of all linear layers but the last have a rank equal to a client's terms; the rest is whole."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        *names, _ = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
        width = min(min(module.get_submodule(name).weight.shape) for name in names)
        rank: Any = each(ratios, lambda ratio: math.ceil(ratio * width))
        scale_of_one = math.sqrt(max(rank) if isinstance(rank, Mapping) else rank)
        adapted = {f"{name}.weight" for name in names}
        whole = [name for name, _ in module.named_parameters() if name not in adapted]
        return ls.LoRA(rank, scale_of_one, aggregation, layers=names, train=whole, **options)

    return make


def by_magnitude(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """FIARSE: the largest weights."""
    return ls.FIARSE(ratios)


AS_PUBLISHED = options(clip_weight_lr=float("inf"))
DEFAULT = options(server_momentum=0.8, aggregation=None)
TOP_THEN_COLLECTIVE = ls.Schedule({0: ls.TopN(), 50: ls.Collective()})

SETUPS: dict[str, Setup] = {
    "FedAvg": Setup(None),
    "FedAvg, momentum": Setup(None, momentum=0.5),
    # as published: no spectral start, and no bound on the learning rate of the weight
    "TopN": Setup(ls.TopN(), AS_PUBLISHED),
    "PriSM": Setup(ls.PriSM(), AS_PUBLISHED),
    "Unbiased": Setup(ls.Unbiased(), AS_PUBLISHED),
    "Collective": Setup(ls.Collective(), AS_PUBLISHED),
    "slack 5 %": Setup(ls.EffectiveCohort(0.05), AS_PUBLISHED),
    "TopN, then Collective": Setup(TOP_THEN_COLLECTIVE, AS_PUBLISHED),
    # with one of the two changes
    "bound alone, TopN": Setup(ls.TopN()),
    "bound alone, PriSM": Setup(ls.PriSM()),
    "bound alone, Unbiased": Setup(ls.Unbiased()),
    "bound alone, Collective": Setup(ls.Collective()),
    "bound alone, coordinated": Setup(ls.Collective(), options(design=ls.designs.Coordinated())),
    "bound alone, slack 50 %": Setup(ls.EffectiveCohort(0.5)),
    "start alone, TopN": Setup(ls.TopN(), AS_PUBLISHED, START),
    "start alone, Collective": Setup(ls.Collective(), AS_PUBLISHED, START),
    "start alone, Collective, momentum": Setup(ls.Collective(), AS_PUBLISHED, START, momentum=0.5),
    # with both
    "start, TopN": Setup(ls.TopN(), start=START),
    "start, PriSM": Setup(ls.PriSM(), start=START),
    "start, Unbiased": Setup(ls.Unbiased(), start=START),
    "start, Collective": Setup(ls.Collective(), start=START),
    "default": Setup(ls.Collective(), DEFAULT, START),
    "default, term means": Setup(ls.Collective(), options(server_momentum=0.8), START),
    "default, estimated": Setup(ls.Collective(), DEFAULT, START, estimated=True),
    "default, term means, estimated": Setup(ls.Collective(), options(server_momentum=0.8), START, estimated=True),
    "default, attention whole": Setup(ls.Collective(), DEFAULT + options(exclude=["*self_attn*"]), START),
    "default, Unbiased": Setup(ls.Unbiased(), DEFAULT, START),
    "default, PriSM": Setup(ls.PriSM(), DEFAULT, START),
    "default, Unbiased, term means": Setup(ls.Unbiased(), options(server_momentum=0.8), START),
    "default, PriSM, term means": Setup(ls.PriSM(), options(server_momentum=0.8), START),
    "default, matrices": Setup(
        ls.Collective(), options(server_momentum=0.8, aggregation=ls.algorithms.MatrixMeans()), START
    ),
    "FedAvg, bounded momentum": Setup(None, bounded=0.8),
    "start, coordinated": Setup(ls.Collective(), options(design=ls.designs.Coordinated()), START),
    "start, TopN, then Collective": Setup(TOP_THEN_COLLECTIVE, start=START),
    # a fit of federated averaging, then one that continues from its weights; trained weights need ``trained=True``
    "20 dense rounds, TopN": Setup(ls.TopN(), dense_rounds=20),
    "20 dense rounds, Collective": Setup(ls.Collective(), dense_rounds=20),
    "20 dense rounds, start, Collective": Setup(
        ls.Collective(), start=ls.algorithms.SpectralStart(trained=True), dense_rounds=20
    ),
    # other starts and bounds
    "start 0.3, Collective": Setup(ls.Collective(), start=ls.algorithms.SpectralStart(tail=0.3)),
    "start 0.3, slack 50 %": Setup(ls.EffectiveCohort(0.5), start=ls.algorithms.SpectralStart(tail=0.3)),
    "start 0.02, Collective": Setup(ls.Collective(), start=ls.algorithms.SpectralStart(tail=0.02)),
    "start of 20 %, Collective": Setup(ls.Collective(), start=ls.algorithms.SpectralStart(keep_ratio=0.2)),
    "start, Collective, bound 3": Setup(ls.Collective(), options(clip_weight_lr=3.0), START),
    "start, Collective, bound 10": Setup(ls.Collective(), options(clip_weight_lr=10.0), START),
    "start, TopN, bound 10": Setup(ls.TopN(), options(clip_weight_lr=10.0), START),
    "start, Collective, no decay": Setup(ls.Collective(), options(frobenius_decay=0.0), START),
    "start, Collective, momentum": Setup(ls.Collective(), start=START, momentum=0.5),
    "start, Collective, matrices": Setup(ls.Collective(), options(aggregation=ls.algorithms.MatrixMeans()), START),
    "start, TopN, matrices": Setup(ls.TopN(), options(aggregation=ls.algorithms.MatrixMeans()), START),
    "start, Collective, estimated": Setup(ls.Collective(), start=START, estimated=True),
    "FedAvg, estimated": Setup(None, estimated=True),
    "start, Collective, fading 1 %": Setup(ls.Collective(), start=START, fading=0.01),
    "start, Collective, fading 10 %": Setup(ls.Collective(), start=START, fading=0.1),
    # other systems
    "HeteroFL": Setup(None, system=by_width(ls.PrefixChannels())),
    "HeteroFL, Scaler": Setup(None, system=by_width(ls.PrefixChannels(), scaler=True)),
    "HeteroFL, equal bytes": Setup(None, system=at_equal("budget_bytes", "round_bytes")),
    "HeteroFL, equal multiplications": Setup(None, system=at_equal("budget_macs", "macs")),
    "FjORD": Setup(None, system=by_drawn_width),
    "FedRolex": Setup(None, system=by_width(ls.RollingChannels())),
    "Federated Dropout": Setup(None, system=by_width(ls.RandomChannels())),
    "FIARSE": Setup(None, system=by_magnitude),
    "FedHM": Setup(None, system=by_matrices),
    "PriSM, outputs cut": Setup(None, system=by_cut_outputs(1)),
    "PriSM-O2": Setup(None, system=by_cut_outputs(2)),
    "FedMUD": Setup(None, system=by_updates(ls.PaddedFactors(), merge_every=1)),
    "FedMUD, exact average": Setup(None, system=by_updates(ls.StackedProducts())),
}
OTHER_SYSTEMS = tuple(name for name, setup in SETUPS.items() if setup.system is not None)
ONLY_ON: Mapping[str, tuple[str, ...]] = {
    "default, attention whole": ("transformer",),
    "FedMUD": ("MLP", "transformer"),
    "FedMUD, exact average": ("MLP", "transformer"),
}  # networks on which a setup is run, if not on all
