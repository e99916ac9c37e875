"""What is compared: algorithms at a keep ratio, and the server's steps, each of which goes with every algorithm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from allocation import ALLOCATIONS, allocated
from hosvd import HosvdSharding
from server_steps import ExponentialMeanSGD, PerParameterSGD, Tried
from tangent import TangentSharding
from tasks import NUM_CLIENTS
from torch import nn

import lightning_spectral as ls
from lightning_spectral.server.optimizers import FedOptimizer

NARROW = "narrow net"  # another module, so another network for all
WIDTH_AND_TERMS = "width x terms"  # terms of another module, which has three quarters of the channels
FEW_LABELS = "few labels: "  # a setup with the hooks for clients with few labels
CLIPPED = "clipped: sharding"  # with one of them alone
ESTIMATED = "averages estimated: "  # a setup with BatchNorm averages of all training data for evaluation
LARGE = "second half: "  # a setup without the clients of the smaller keep ratio
MIXED = {"0.1 and 0.4": (0.1, 0.4), "0.05 and 1": (0.05, 1.0)}  # keep ratios of the two halves of the clients
KeepRatio = float | str  # a share of the terms, or a key of MIXED
EXAMPLES = torch.zeros(2, 1, 14, 14)  # inputs of the networks
Ratios = float | Sequence[float]
Setup = Callable[[Ratios, nn.Module], ls.Algorithm]


def each(ratios: Ratios, change: Callable[[float], float]) -> Ratios:
    """Change each keep ratio."""
    if isinstance(ratios, Sequence):
        changed = {ratio: change(ratio) for ratio in dict.fromkeys(ratios)}
        return [changed[ratio] for ratio in ratios]
    return change(ratios)


def dense(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """Federated averaging: whole models, whatever the keep ratio."""
    return ls.FedAvg()


def sharding(strategy: ls.sharding.ShardingStrategy | None = None, **options: Any) -> Setup:
    """Spectral sharding as it is by default, apart from some options."""
    return lambda ratios, module: ls.SpectralSharding(strategy or ls.Collective(), ratios, **options)


def published(strategy: ls.sharding.ShardingStrategy, **options: Any) -> Setup:
    """The papers' recipe: no spectral start, no bound on the learning rate of the weight, and means of terms."""
    return lambda ratios, module: ls.SpectralSharding.published(strategy, ratios, **options)


def by_width(channels: ls.sharding.ChannelChoice, **options: Any) -> Setup:
    """Sub-models whose share of the channels is the square root of the keep ratio, to match its share of parameters."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        plan = ls.nn.width_plan(module, EXAMPLES)
        return ls.WidthSharding(channels, each(ratios, math.sqrt), plan=plan, **options)

    return make


def by_drawn_width(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """FjORD: the first channels; some steps use fewer of them, down to half of what the smallest clients have."""
    widths = each(ratios, math.sqrt)
    all_widths = sorted({*widths}) if isinstance(widths, Sequence) else [widths]
    plan = ls.nn.width_plan(module, EXAMPLES)
    return ls.WidthSharding(keep_ratio=widths, plan=plan, step_widths=[min(all_widths) / 2, *all_widths])


def at_equal(budget: str, need: str) -> Setup:
    """The first channels, as many as cost no more than the terms of the same keep ratio."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        algorithm = ls.WidthSharding(plan=ls.nn.width_plan(module, EXAMPLES))

        def width_of(ratio: float) -> float:
            return as_costly(ratio, module, module, algorithm, budget, need)

        return replace(algorithm, keep_ratio=each(ratios, width_of))

    return make


def as_costly(
    ratio: float,
    module: Any,
    network: Any,
    algorithm: ls.Algorithm,
    budget: str = "budget_bytes",
    need: str = "round_bytes",
) -> float:
    """Return the largest share of a network that costs no more than the terms of a keep ratio of a module."""
    terms = ls.cost_table(module, ls.SpectralSharding(), [ratio], EXAMPLES).at[ratio]
    limit: Any = {budget: getattr(terms, need)}
    share = ls.largest_that_fits(network, algorithm, EXAMPLES, **limit)
    assert isinstance(share, float), "one budget, one answer"
    return share


def by_cut_outputs(factor: float) -> Setup:
    """PriSM's memory-efficient sub-models: they also cut the outputs, to ``factor`` times the smallest keep ratio."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        smallest = min(ratios) if isinstance(ratios, Sequence) else ratios
        return ls.SpectralSharding.published(ls.PriSM(), ratios, output_ratio=factor * smallest)

    return make


def by_updates(aggregation: ls.algorithms.AdapterAggregation, **options: Any) -> Setup:
    """FedMUD: updates of all linear layers but the last have a rank equal to a client's terms; the rest is whole."""

    def make(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
        *names, _ = [name for name, layer in module.named_modules() if type(layer) is nn.Linear]
        width = min(min(module.get_submodule(name).weight.shape) for name in names)
        rank: Any = each(ratios, lambda ratio: math.ceil(ratio * width))
        scale_of_one = math.sqrt(max(rank) if isinstance(rank, Sequence) else rank)
        adapted = {f"{name}.weight" for name in names}
        whole = [name for name, _ in module.named_parameters() if name not in adapted]
        return ls.LoRA(rank, scale_of_one, aggregation, layers=names, train=whole, **options)

    return make


def by_magnitude(ratios: Ratios, module: nn.Module) -> ls.Algorithm:
    """FIARSE: the largest weights."""
    return ls.FIARSE(ratios)


def smallest(keep_ratio: KeepRatio) -> float:
    """Return the keep ratio of the clients that have the least."""
    return min(MIXED[keep_ratio]) if isinstance(keep_ratio, str) else keep_ratio


def of_all(setup: str, keep_ratio: KeepRatio, module: Any) -> tuple[Any, KeepRatio]:
    """Return the network that all clients share, and its keep ratio, for the bytes of terms of the whole module."""
    if setup.endswith(NARROW):
        by_widths = ls.WidthSharding(plan=ls.nn.width_plan(module, EXAMPLES))
        return at_width(as_costly(smallest(keep_ratio), module, module, by_widths), module), keep_ratio
    if setup.endswith(WIDTH_AND_TERMS):
        network = at_width(0.75, module)
        return network, as_costly(smallest(keep_ratio), module, network, ls.SpectralSharding())
    return module, keep_ratio


def at_width(width: float, module: Any) -> Any:
    """The network with the first of its channels, as another module."""
    algorithm = ls.WidthSharding(keep_ratio=width, plan=ls.nn.width_plan(module, EXAMPLES))
    return ls.algorithms.narrow_model(ls.FederatedModule(module, algorithm=algorithm), width)


def hooks_of(setup: str, module: nn.Module, num_rounds: int) -> list[ls.client.LocalHook]:
    """What a setup adds to local steps."""
    if setup == CLIPPED:
        return [ls.GradientClip(1.0)]
    return few_label_hooks(module, num_rounds) if setup.startswith(FEW_LABELS) else []


def few_label_hooks(module: nn.Module, num_rounds: int) -> list[ls.client.LocalHook]:
    """What setups for few labels add to local steps."""
    *_, head = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    hooks: list[ls.client.LocalHook] = [
        ls.CalibratedLogits(head, rounds=num_rounds),
        ls.GradientClip(1.0),
    ]
    has_averages = any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    return hooks + [ls.FixedBatchNorm(num_rounds // 2)] * has_averages


SERVERS: dict[str, FedOptimizer] = {
    "averaging": ls.FedAvgM(lr=1.0, momentum=0.0),
    "momentum": ls.BoundedMomentum(momentum=0.8),
    "exponential mean": Tried(ExponentialMeanSGD),
    "momentum, own norms": Tried(PerParameterSGD),
}
SETUPS: dict[str, Setup] = {
    "FedAvg": dense,
    "sharding": sharding(),
    "TopN, published": published(ls.TopN()),
    "PriSM, published": published(ls.PriSM()),
    "Unbiased, published": published(ls.Unbiased()),
    "Collective, published": published(ls.Collective()),
    # one part of the default less
    "sharding, no start": sharding(spectral_start=None),
    "sharding, no bound": sharding(clip_weight_lr=math.inf),
    "sharding, tangent": lambda ratios, module: TangentSharding(keep_ratio=ratios),
    "sharding, bound 2": sharding(clip_weight_lr=2.0),
    "sharding, means of terms": sharding(aggregation=ls.algorithms.TermMeans()),
    "sharding, Unbiased": sharding(ls.Unbiased()),
    "sharding, PriSM": sharding(ls.PriSM()),
    "sharding, attention whole": sharding(exclude=["*self_attn*"]),
    # other numbers of terms in each layer, for the same bytes
    **{f"sharding, {kind}": allocated(kind) for kind in ALLOCATIONS},
    # other layouts, for the same bytes
    "Tucker factors": sharding(layers=ls.LayerChoices(convolutions="tucker")),
    NARROW: dense,
    WIDTH_AND_TERMS: sharding(),
    CLIPPED: sharding(),
    # for clients that differ in capacity
    "FedHM, spectral start": sharding(ls.TopN()),
    "FedHM, Tucker factors": lambda ratios, module: HosvdSharding.published(
        ls.TopN(), ratios, aggregation=ls.algorithms.MatrixMeans()
    ),
    f"{LARGE}FedAvg": dense,
    f"{ESTIMATED}FedAvg": dense,
    f"{ESTIMATED}{NARROW}": dense,
    f"{ESTIMATED}HeteroFL": by_width(ls.PrefixChannels()),
    f"{ESTIMATED}FedHM": published(ls.TopN(), aggregation=ls.algorithms.MatrixMeans()),
    # other systems
    "HeteroFL": by_width(ls.PrefixChannels()),
    "HeteroFL, Scaler": by_width(ls.PrefixChannels(), scaler=True),
    "HeteroFL, equal bytes": at_equal("budget_bytes", "round_bytes"),
    "HeteroFL, equal multiplications": at_equal("budget_macs", "macs"),
    "FjORD": by_drawn_width,
    "FedRolex": by_width(ls.RollingChannels()),
    "Federated Dropout": by_width(ls.RandomChannels()),
    "FIARSE": by_magnitude,
    "FedHM": published(ls.TopN(), aggregation=ls.algorithms.MatrixMeans()),
    "PriSM, outputs cut": by_cut_outputs(1),
    "PriSM-O2": by_cut_outputs(2),
    "FedMUD": by_updates(ls.PaddedFactors(), merge_every=1),
    "FedMUD, exact average": by_updates(ls.StackedProducts()),
}
ALLOCATED = tuple(f"sharding, {kind}" for kind in ALLOCATIONS)
OWN_ROUNDS = ("FeDLRT",)  # systems with rounds of their own, which are no algorithms of the package
OTHER_SYSTEMS = (*tuple(SETUPS)[list(SETUPS).index("HeteroFL") :], *OWN_ROUNDS)
WITH_HOOKS = ("FedAvg", NARROW, "sharding", "Tucker factors", WIDTH_AND_TERMS, "FedHM")
SETUPS |= {f"{FEW_LABELS}{name}": SETUPS[name] for name in WITH_HOOKS}
CONVOLUTIONAL = ("plain, GroupNorm", "plain, BatchNorm", "residual", "residual, zero init")
NOT_RESIDUAL = ("plain, GroupNorm", "MLP", "plain, BatchNorm", "transformer")
ONLY_ON: Mapping[str, tuple[str, ...]] = {
    "sharding, attention whole": ("transformer",),
    "sharding, attention thrice": ("transformer",),
    **{name: ("plain, BatchNorm",) for name in SETUPS if name.startswith(ESTIMATED)},
    "FedHM, Tucker factors": CONVOLUTIONAL,
    "HeteroFL, equal bytes": NOT_RESIDUAL,  # on the residual nets, as many channels as HeteroFL itself
    "HeteroFL, equal multiplications": NOT_RESIDUAL,
    "FedMUD": ("MLP", "transformer"),
    "FedMUD, exact average": ("MLP", "transformer"),
}  # networks on which a setup is run, if not on all


def algorithm_of(setup: str, keep_ratio: KeepRatio, module: nn.Module) -> ls.Algorithm:
    """Return the algorithm of a setup at one keep ratio, for one module."""
    ratios: Any = keep_ratio
    if isinstance(keep_ratio, str):
        first, second = MIXED[keep_ratio]
        ratios = [first] * (NUM_CLIENTS // 2) + [second] * (NUM_CLIENTS // 2)
    return SETUPS[setup](ratios, module)
