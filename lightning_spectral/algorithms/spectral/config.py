"""Spectral model sharding: clients train sampled singular terms of every affine layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import nn
from torch.optim import ASGD, SGD, Optimizer

from lightning_spectral.algorithms.base import ByKeepRatio
from lightning_spectral.algorithms.spectral.aggregation import TermAggregation
from lightning_spectral.algorithms.spectral.device import SpectralSide
from lightning_spectral.algorithms.spectral.server import Sampling, SpectralHalf
from lightning_spectral.algorithms.spectral.start import PlannedModule, SpectralStart
from lightning_spectral.arguments import Number, as_patterns, check_fields
from lightning_spectral.designs import Design
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.functional.spectra import KEEP_RATIO, TAU, WEIGHT_LR
from lightning_spectral.nn.plan.module_plan import LayerChoices, ModulePlan
from lightning_spectral.nn.plan.planner import check_layers, plan_of
from lightning_spectral.protocol.buffer_rules import Rules, buffer_rules
from lightning_spectral.protocol.per_client import PerClient, Schedule, check_per_client, entries_of, values_of
from lightning_spectral.sharding import Collective, ShardingStrategy

AS_PUBLISHED = {"clip_weight_lr": math.inf, "spectral_start": None}


@dataclass(frozen=True)
class SpectralSharding(ByKeepRatio):
    """Each client trains ceil(r N) sampled singular terms of every affine layer, and the rest of the model whole.

    Args:
        strategy: Turns a layer's singular values into inclusion probabilities and multipliers; or a `Schedule` of
            strategies.
        keep_ratio: Share r of the terms a client holds: one for all; ``{ratio: share of clients}``; or one per client.
        design: Draws terms with those probabilities; ``None`` for the strategy's own (conditional Poisson sampling; for
            PriSM successive sampling, as in its paper). May also be a `Schedule` of designs.
        clip_tau: Bound on a term's effective learning rate, in units of the nominal one; ``float("inf")`` for none.
            Exact for SGD; adaptive optimizers undo it, and a `SpectralWarning` says so.
        frobenius_decay: Coefficient lambda of the penalty ``lambda / 2 ||W_hat||_F^2`` on each sharded layer. The
            ``weight_decay`` of the user's optimizer never acts on the factors; it is added to lambda instead.
        exclude: Shell-style patterns of the names of layers that stay dense: short for
            ``layers=LayerChoices(exclude=...)``, where they are stored.
        layers: Which layers are sharded, how finely, and the rules of buffers; or the plan that `validate`
            returned, which fixes the outcome for every layer. Given choices, the plan is made when training starts,
            with a traced forward pass if the module has an ``example_input_array``.
        clip_weight_lr: Bound on the learning rate at which a step moves the weight along a term, in units of the
            nominal one; ``float("inf")`` for none. Without a bound, the weight moves along a term of singular value s
            at 2 omega^2 s times the rate of a dense layer; with 1, not faster than in a dense layer. That is exact for
            SGD and a client's first step, for which the bound is computed: factors that grow during a turn move faster,
            and adaptive optimizers undo it.
        spectral_start: Moves the energy of random weights into their first terms before the first round; ``None`` to
            train from the weights as they are. Weights that look trained are unchanged.
        output_ratio: Share q of each sharded layer's output channels, the leading ones, that a client computes. The
            others are zero on the client and take no memory there. Short for ``layers=LayerChoices(output_ratio=...)``,
            where it is stored.
        aggregation: How the clients' sub-models are combined into one weight: `TermMeans`, or `MatrixMeans` as in
            FedHM. ``None`` for means of matrices where the spectral start has moved energy, whose other terms hold
            nothing worth keeping, and means of terms elsewhere, as in the paper.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a ratio is outside (0, 1], shares do not sum to 1, ``clip_tau`` is below 1, ``clip_weight_lr`` is
            not positive, ``frobenius_decay`` is negative, or ``layers`` is given together with ``exclude``, or has
            another ``output_ratio``.

    Note:
        Clients of different keep ratios form groups; each group's probabilities are computed for the number of its
        clients in this round, as in the 2024 paper.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1. Niu et al. (2023), section 3.2.1 and Eq. (5), for ``output_ratio``.

    Example:
        >>> SpectralSharding(Collective(), keep_ratio={0.2: 0.6, 0.4: 0.4}).keep_ratio
        {0.2: 0.6, 0.4: 0.4}
        >>> SpectralSharding(exclude=["head"]) == SpectralSharding(layers=LayerChoices(exclude=["head"]))
        True
    """

    side: ClassVar[type[SpectralSide]] = SpectralSide
    updates_have_norms: ClassVar[bool] = True

    strategy: ShardingStrategy | Schedule[ShardingStrategy] = field(default_factory=Collective)
    keep_ratio: PerClient[float] = 0.2
    design: Design | Schedule[Design | None] | None = None
    clip_tau: float = 10.0
    frobenius_decay: float = 1e-4
    exclude: Sequence[str] = field(default=(), repr=False, compare=False)  # moves into `layers`; empty afterwards
    layers: LayerChoices | ModulePlan = LayerChoices()
    clip_weight_lr: float = 1.0
    spectral_start: SpectralStart | None = SpectralStart()
    output_ratio: float | None = field(default=None, repr=False, compare=False)  # also moves into `layers`
    aggregation: TermAggregation | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_per_client, rule=KEEP_RATIO),
            clip_tau=TAU,
            frobenius_decay=Number(at_least=0),
            clip_weight_lr=WEIGHT_LR,
            exclude=as_patterns,
        )
        check_by_round(self.strategy, self.design)
        if self.spectral_start is not None:
            check_is("spectral_start", self.spectral_start, SpectralStart)
        if self.aggregation is not None:
            check_is("aggregation", self.aggregation, TermAggregation)
        check_layers(self.layers)
        if self.exclude:
            object.__setattr__(self, "layers", excluding(self.exclude, self.layers))
            object.__setattr__(self, "exclude", ())
        if self.output_ratio is not None:
            object.__setattr__(self, "layers", cutting(self.output_ratio, self.layers))
            object.__setattr__(self, "output_ratio", None)

    @classmethod
    def published(
        cls,
        strategy: ShardingStrategy | Schedule[ShardingStrategy] | None = None,
        keep_ratio: PerClient[float] = 0.2,
        **options: Any,
    ) -> SpectralSharding:
        """The paper's recipe: initial weights, steps of clients and averages as they are.

        Example:
            >>> SpectralSharding.published(keep_ratio=0.1).spectral_start is None
            True
        """
        chosen = Collective() if strategy is None else strategy
        return cls(chosen, keep_ratio, **{**AS_PUBLISHED, **options})

    def plan(self, server: nn.Module) -> ModulePlan:
        """How clients hold every layer and buffer of ``server``; all problems are reported in one ``ValueError``."""
        return plan_of(server, self.layers)

    def cut_sizes(self, server: nn.Module) -> set[float]:
        return {block.ratio_factor * block.num_singular for block in self.plan(server).blocks.values()}

    @property
    def buffers(self) -> Rules:
        """Rules for buffers by patterns of their names, which ``layers`` holds."""
        return (self.layers.choices if isinstance(self.layers, ModulePlan) else self.layers).buffers

    def check(self, server: nn.Module) -> None:
        warn_of_whole_layers(server, self.plan(server))

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        if self.plan(server).sharded:
            warn_of_optimizer(template, self.clip_tau, self.frobenius_decay)

    def bind(
        self,
        server: nn.Module,
        state: nn.Module | None = None,
        *,
        untrained: Collection[str] = (),
        decisions: Mapping[str, Any] | None = None,
    ) -> SpectralHalf:
        """Decide which layers are sharded; layers stay dense if no optimizer steps one of their weights."""
        missing_rank = None if decisions is None else decisions.get("missing_rank", {})
        plan = plan_of(server, self.layers, missing_rank=missing_rank).keeping_dense(untrained, "in no optimizer")
        planned = PlannedModule(server, plan, buffer_rules(server, self.buffers, decisions))
        device_half = self.side(
            plan, tuple(planned.returned()), self.clip_tau, self.clip_weight_lr, self.frobenius_decay
        )
        sampling = Sampling(self.strategy, self.design, self.aggregation)
        return SpectralHalf(planned, device_half, sampling, self._start(), (decisions or {}).get("started", ()))

    def _start(self) -> SpectralStart | None:
        """The spectral start for the smallest clients, unless the user says for which."""
        start = self.spectral_start
        if start is None or start.keep_ratio is not None:
            return start
        return replace(start, keep_ratio=min(entries_of(self.keep_ratio)))


def check_by_round(strategy: object, design: object) -> None:
    """Raise ``TypeError`` unless both have the right type, in every round if they are schedules."""
    for name, setting in {"strategy": strategy, "design": design}.items():
        if isinstance(setting, Mapping):
            raise TypeError(f"`{name}` by round must be a Schedule, got {setting!r}; write Schedule({setting!r}).")
    for one in values_of(strategy):
        check_is("strategy", one, ShardingStrategy)
    for one in values_of(design):
        if one is not None:
            check_is("design", one, Design)


def excluding(exclude: Sequence[str], layers: LayerChoices | ModulePlan) -> LayerChoices:
    """Layer choices that exclude some layers; raise ``ValueError`` if ``layers`` is given too."""
    choices = LayerChoices(exclude=exclude)
    if layers != LayerChoices():
        raise ValueError(
            f"`exclude={choices.exclude}` is short for `layers=LayerChoices(exclude={choices.exclude})`, but `layers` "
            "is given too. Put the patterns into its LayerChoices; for a plan, pass them to `validate`."
        )
    return choices


def cutting(output_ratio: float, layers: LayerChoices | ModulePlan) -> LayerChoices | ModulePlan:
    """The same layers, with clients computing only a share of the outputs.

    Raise ``ValueError`` if ``layers`` sets another share, or is a plan made with another one.
    """
    choices = layers if isinstance(layers, LayerChoices) else layers.choices
    wanted = replace(choices, output_ratio=output_ratio)
    if wanted == choices:
        return layers
    if isinstance(layers, ModulePlan) or choices.output_ratio != 1.0:
        raise ValueError(
            f"`output_ratio={output_ratio:g}`, but `layers` has {choices.output_ratio:g}; set it once, in "
            "LayerChoices(output_ratio=...), which `validate` takes as well."
        )
    return wanted


def warn_of_whole_layers(server: nn.Module, plan: ModulePlan) -> None:
    """Warn if no layer is sharded, and about layers of which every client would hold all terms."""
    if not plan.sharded:
        warnings.warn(
            f"SpectralSharding shards no layer of {type(server).__name__}, so clients train whatever is not frozen as "
            "with FedAvg(); `validate` says why for each layer.",
            SpectralWarning,
            stacklevel=4,
        )
    if plan.whole:
        listed = ", ".join(f"{name} (N = {count})" for name, count in plan.whole.items())
        warnings.warn(
            f"`term_granularity={plan.choices.term_granularity}` rounds up to all terms of {listed}, so every "
            "client holds them whole whatever its keep ratio; lower it to shard them, or list them in `exclude`.",
            SpectralWarning,
            stacklevel=4,
        )


def warn_of_optimizer(template: Optimizer, clip_tau: float, frobenius_decay: float) -> None:
    """Warn about optimizers that undo the clip, and say where the optimizer's weight decay goes."""
    if math.isfinite(clip_tau) and not isinstance(template, SGD | ASGD):
        warnings.warn(
            f"clip_tau={clip_tau:g} bounds effective learning rates by scaling gradients, as clip_weight_lr does, "
            f"which is exact for SGD, with or without momentum; {type(template).__name__} rescales gradients by their "
            "own history, which undoes it. Use SGD, or turn the bound off with clip_tau=float('inf').",
            SpectralWarning,
            stacklevel=3,
        )
    if decays := sorted({group["weight_decay"] for group in template.param_groups if group.get("weight_decay")}):
        listed = ", ".join(f"{decay:g}" for decay in decays)
        warnings.warn(
            f"weight_decay={listed} of {type(template).__name__} does not act on the factors of sharded layers; it is "
            f"added to their Frobenius decay of {frobenius_decay:g}.",
            SpectralWarning,
            stacklevel=3,
        )
