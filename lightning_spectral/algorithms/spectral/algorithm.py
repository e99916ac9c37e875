"""Spectral sharding: clients train sampled singular terms of every affine layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, AdamW, Optimizer

from lightning_spectral.algorithms.base import (
    UNKNOWN,
    Algorithm,
    Decisions,
    Known,
    Moment,
    Observed,
    Promises,
    Round,
    Setting,
)
from lightning_spectral.algorithms.capacities import KeepRatios
from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide
from lightning_spectral.algorithms.spectral.aggregation import (
    LayerMean,
    MatrixMeans,
    MeanWithinReach,
    SentTerms,
    TermAggregation,
    TermMeans,
    TrainedTerms,
)
from lightning_spectral.algorithms.spectral.start import (
    SpectralStart,
    assembled,
    matrices_of,
    move_energy,
    of_each_matrix,
    with_absent_rows,
)
from lightning_spectral.algorithms.spectral.tucker import TuckerRound, TuckerState, ranks_of
from lightning_spectral.algorithms.term_draws import TermDraws, first_terms, places_of_terms, plan_draws
from lightning_spectral.arguments import Number, as_patterns, check_fields
from lightning_spectral.client.device import StepActions
from lightning_spectral.client.user_optimizer import StandIn
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is, warn
from lightning_spectral.functional.figures import marginal_entropy
from lightning_spectral.functional.spectra import KEEP_RATIO, TAU, WEIGHT_LR, looks_random, singular_terms
from lightning_spectral.nn.cost import CostsBesides
from lightning_spectral.nn.layers.terms import sharded_layers
from lightning_spectral.nn.layers.tucker import PARTS
from lightning_spectral.nn.optimizer_hooks import TermRates, decaying
from lightning_spectral.nn.plan.module_plan import LayerChoices, ModulePlan
from lightning_spectral.nn.plan.planner import check_layers, plan_of, swap_layers, untraced_ends
from lightning_spectral.protocol.buffer_rules import BufferRules
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.per_client import PerClient, Schedule, check_entries, entries_of, value_at, values_of
from lightning_spectral.protocol.records import Download, Options, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.sharding import Collective, ShardingStrategy, TopN
from lightning_spectral.sums import RunningMean, check_summable

AS_PUBLISHED = {"clip_weight_lr": math.inf, "spectral_start": None}
LARGEST_ERROR = 0.5  # share of the squared norm, mean over layers
ROUNDING = torch.finfo(torch.float32).eps  # a term up to this share of the largest one is zero
DECAY = "frobenius_decay"  # option of a group of factors
TELLING = 64  # singular values from which a matrix shows whether it has been trained; a large one would take long


@dataclass(frozen=True, kw_only=True)
class SpectralSide(DenseSide):
    """Sub-models whose sharded layers hold the terms that were sent.

    Attributes:
        plan: How clients hold each layer.
        clip_tau: Bound on the learning rate of a term's vectors.
        clip_weight_lr: Bound on the learning rate of the weight.
        frobenius_decay: Coefficient of the penalty on sharded layers, in addition to the optimizer's weight decay.
    """

    plan: ModulePlan
    clip_tau: float
    clip_weight_lr: float
    frobenius_decay: float

    def take_form(self, module: nn.Module, capacity: float) -> None:
        swap_layers(module, self.plan, lambda sharded, dense, num_terms: sharded.like(dense, num_terms), capacity)

    def stand_ins(self, client: nn.Module) -> dict[str, StandIn]:
        """Factors have Frobenius decay in place of weight decay, which would act on each of them alone."""

        def options(of_weight: Options) -> Options:
            decay = of_weight.get("weight_decay", 0.0)
            return {"weight_decay": 0.0, DECAY: self.frobenius_decay + decay} if decay else {}

        weights = {name: self.plan.blocks[name].parameter for name in sharded_layers(client)}
        found = {f"{name}.u": StandIn(weight, options, layer=name) for name, weight in weights.items()}
        found |= {f"{name}.v": StandIn(weight, options) for name, weight in weights.items()}
        for name in self.plan.tucker:  # whose factors have the weight's own options
            found |= {f"{name}.{part}": StandIn(f"{name}.weight", layer=name) for part in PARTS}
        return found

    def start(self, client: nn.Module, download: Download) -> StepActions:
        """Frobenius decay, then clipping, just before each step."""
        layers = sharded_layers(client)
        rates = TermRates(layers.values(), self.clip_tau, self.clip_weight_lr)
        rates.start_client()

        @cache
        def acting(optimizer: Optimizer) -> Sequence[Callable[[], None]]:
            groups = optimizer.param_groups
            group_of = {id(parameter): group for group in groups for parameter in group["params"]}
            held = {name: id(layer.u) for name, layer in layers.items()}
            decays = {name: group_of[u].get(DECAY, self.frobenius_decay) for name, u in held.items() if u in group_of}
            # decoupled weight decay is a step of its own
            decoupled = isinstance(optimizer, AdamW) or any(group.get("decoupled_weight_decay") for group in groups)
            return decaying(decays, decoupled, optimizer, layers), rates.acting(optimizer)

        def before_step(optimizer: Optimizer) -> None:
            for act in acting(optimizer):
                act()

        return StepActions(before_step=before_step)


@dataclass(frozen=True)
class SpectralSharding(Algorithm):
    """Each client trains ceil(r N) sampled singular terms of every affine layer, and the rest of the model whole.

    Args:
        strategy: Turns a layer's singular values into inclusion probabilities and multipliers; or a `Schedule` of
            strategies.
        keep_ratio: Share r of the terms a client holds: one for all; ``{ratio: share of clients}``; or one per client.
        design: Draws terms with those probabilities; ``None`` for the strategy's own (conditional Poisson sampling; for
            PriSM successive sampling, as in its paper). May also be a `Schedule` of designs.
        clip_tau: Bound on a term's effective learning rate, in units of the nominal one; ``float("inf")`` for none.
            Exact for SGD; it has no effect on adaptive optimizers, and a `SpectralWarning` says so.
        frobenius_decay: Coefficient lambda of the penalty ``lambda / 2 ||W_hat||_F^2`` on each sharded layer. The
            ``weight_decay`` of the user's optimizer never acts on the factors; it is added to lambda instead.
        exclude: Shell-style patterns of the names of layers that stay dense: short for
            ``layers=LayerChoices(exclude=...)``, where they are stored.
        layers: Which layers are sharded, and how finely; or the plan that `validate`
            returned, which fixes the outcome for every layer. Given choices, the plan is made when training starts,
            with a traced forward pass if the module has an ``example_input_array``.
        clip_weight_lr: Bound on the learning rate at which a step moves the weight along a term, in units of the
            nominal one; ``float("inf")`` for none. Without a bound, the weight moves along a term of singular value s
            at 2 omega^2 s times the rate of a dense layer; with 1, not faster than in a dense layer. That is exact for
            SGD and a client's first step, for which the bound is computed: factors that grow during a turn move faster,
            and adaptive optimizers are not bound.
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
        clients in this round, as in the 2024 paper. A layer whose weight stays with clients (`Personal`) is not
        sharded.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1. Niu et al. (2023), section 3.2.1 and Eq. (5), for ``output_ratio``.

    Example:
        >>> SpectralSharding(Collective(), keep_ratio={0.2: 0.6, 0.4: 0.4}).keep_ratio
        {0.2: 0.6, 0.4: 0.4}
        >>> SpectralSharding(exclude=["head"]) == SpectralSharding(layers=LayerChoices(exclude=["head"]))
        True
    """

    side: ClassVar[type[SpectralSide]] = SpectralSide

    strategy: ShardingStrategy | Schedule[ShardingStrategy] = field(default_factory=Collective)
    keep_ratio: PerClient[float] = 0.2
    design: Design | Schedule[Design | None] | None = None
    clip_tau: float = 10.0
    frobenius_decay: float = 1e-4
    exclude: Sequence[str] = field(default=(), repr=False, compare=False)  # moves into `layers`, and says what is there
    layers: LayerChoices | ModulePlan = LayerChoices()
    clip_weight_lr: float = 1.0
    spectral_start: SpectralStart | None = SpectralStart()
    output_ratio: float | None = field(default=None, repr=False, compare=False)  # also moves into `layers`
    aggregation: TermAggregation | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_entries, rule=KEEP_RATIO),
            clip_tau=TAU,
            frobenius_decay=Number(at_least=0),
            clip_weight_lr=WEIGHT_LR,
            exclude=as_patterns,
        )
        for name, setting in {"strategy": self.strategy, "design": self.design}.items():
            if isinstance(setting, Mapping):
                raise TypeError(f"`{name}` by round must be a Schedule, got {setting!r}; write Schedule({setting!r}).")
        for strategy in values_of(self.strategy):
            check_is("strategy", strategy, ShardingStrategy)
        for design in values_of(self.design):
            check_is("design", design, Design | None)
        check_is("spectral_start", self.spectral_start, SpectralStart | None)
        check_is("aggregation", self.aggregation, TermAggregation | None)
        check_layers(self.layers)
        if self.exclude and self.exclude != self._layer_choices.exclude:
            choices = LayerChoices(exclude=self.exclude)
            if self.layers != LayerChoices():
                raise ValueError(
                    f"`exclude={choices.exclude}` is short for `layers=LayerChoices(exclude={choices.exclude})`, but "
                    "`layers` is given too. Put the patterns there; for a plan, pass them to `validate`."
                )
            object.__setattr__(self, "layers", choices)
        object.__setattr__(self, "exclude", self._layer_choices.exclude)
        if self.output_ratio is not None:
            choices = self._layer_choices
            wanted = replace(choices, output_ratio=self.output_ratio)
            if wanted != choices:
                if isinstance(self.layers, ModulePlan) or choices.output_ratio != 1.0:
                    raise ValueError(
                        f"`output_ratio={self.output_ratio:g}`, but `layers` has {choices.output_ratio:g}; set it "
                        "once, in LayerChoices(output_ratio=...), which `validate` takes as well."
                    )
                object.__setattr__(self, "layers", wanted)
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

    @property
    def promises(self) -> Promises:  # type: ignore[override]
        """Noise hides clients only where all hold the same terms, whoever takes part."""
        ratios, strategies = set(entries_of(self.keep_ratio)), values_of(self.strategy)
        same = not self.is_mixed and (ratios == {1.0} or all(type(each) is TopN for each in strategies))
        known = type(self.aggregation) in (type(None), TermMeans, MatrixMeans)
        return Promises(
            new_values=True,
            values_alone=True,
            noise_hides=same and known,
            parts_stay=True,
            any_steps=True,
            clients_may_join=True,
            remedies={"noise_hides": "give all clients the same terms, SpectralSharding(TopN(), keep_ratio=0.2)"},
        )

    def plan(self, server: nn.Module) -> ModulePlan:
        """How clients hold every layer of ``server``; all problems are reported in one ``ValueError``."""
        return plan_of(server, self.layers)

    @property
    def capacities(self) -> SharesOfTerms:
        return SharesOfTerms(
            self,
            self.keep_ratio,
            lambda server: {block.ratio_factor * block.num_singular for block in self.plan(server).matrices.values()},
        )

    @property
    def is_mixed(self) -> bool:
        """Whether clients have different keep ratios."""
        return len(set(entries_of(self.keep_ratio))) > 1

    @property
    def _layer_choices(self) -> LayerChoices:
        return self.layers.choices if isinstance(self.layers, ModulePlan) else self.layers

    def check(self, plan: Setting) -> None:
        """Warn if no layer is sharded, of layers of which every client would hold all terms, and of optimizers."""
        held = self.plan(plan.module).keeping_dense(plan.stays, "personal")
        for template in plan.optimizers:
            self._check_optimizer(template, held, plan.module)
        if plan.optimizers:
            return
        if not held.sharded:
            warn(
                f"SpectralSharding shards no layer of {type(plan.module).__name__}, so clients train whatever is not "
                "frozen as with FedAvg(); `validate` says why for each layer.",
                3,
            )
        if held.whole:
            listed = ", ".join(f"{name} (N = {count})" for name, count in held.whole.items())
            warn(
                f"`term_granularity={held.choices.term_granularity}` rounds up to all terms of {listed}, so every "
                "client holds them whole whatever its keep ratio; lower it to shard them, or list them in `exclude`.",
                3,
            )

    def _check_optimizer(self, template: Optimizer, plan: ModulePlan, module: nn.Module) -> None:
        """Warn about optimizers that the clip does not affect, and say where the optimizer's weight decay goes."""
        if not plan.blocks:
            return
        kind = type(template).__name__
        if math.isfinite(self.clip_tau) and not isinstance(template, SGD | ASGD):
            matrices = sorted(matrices_of(module, plan).values(), key=torch.Tensor.numel)
            one = next((each for each in matrices if min(each.shape) >= TELLING), matrices[-1])
            random = looks_random(torch.linalg.svdvals(one.double()), (len(one), one.shape[1]))
            rate = ", upwards: twice the dense model's, then more; torch's default of 1e-3 is often ten times too small"
            warn(
                f"{kind} rescales gradients by their own history, so neither clip_tau={self.clip_tau:g} nor "
                f"clip_weight_lr={self.clip_weight_lr:g} bounds its steps. Use SGD, for which both are exact; or tune "
                f"its learning rate anew{rate if random else ''}. clip_tau=float('inf') silences this."
            )
        if decays := sorted({group["weight_decay"] for group in template.param_groups if group.get("weight_decay")}):
            listed = ", ".join(f"{decay:g}" for decay in decays)
            warn(
                f"weight_decay={listed} of {kind} does not act on the factors of sharded layers; it is added to their "
                f"Frobenius decay of {self.frobenius_decay:g}."
            )

    def new_state(self, server: nn.Module, seed: int) -> TuckerState | None:
        """The factors of convolutions, if clients hold some."""
        layers = self.plan(server).tucker if self._layer_choices.convolutions == "tucker" else {}
        return TuckerState(server, layers, max(entries_of(self.keep_ratio))) if layers else None

    def bind(self, server: nn.Module, state: nn.Module | None = None, known: Known = UNKNOWN) -> SpectralHalf:
        """Decide which layers are sharded; layers stay dense if no optimizer steps one of their weights."""
        missing_rank = None if known.decisions is None else known.decisions.get("missing_rank", {})
        plan = plan_of(server, self.layers, missing_rank=missing_rank).keeping_dense(known.untrained, "in no optimizer")
        factors = state if isinstance(state, TuckerState) else None
        without = [f"{name}.weight" for name in plan.tucker if factors is None or name not in factors.names]
        plan = plan.keeping_dense(without, "without factors: its weight was constant before")
        return SpectralHalf(self, server, plan, known.rules, known.decisions, factors)


class SharesOfTerms(KeepRatios[SpectralSharding]):
    """Keep ratios, the largest of which says how large the server's factors of convolutions are, if it has some."""

    def choices(self, capacities: Sequence[float]) -> Mapping[float, tuple[SpectralSharding, float]]:
        found = super().choices(capacities)
        if self.choice._layer_choices.convolutions != "tucker":
            return found
        choice = replace(self.choice, keep_ratio=tuple(found))
        return {keep_ratio: (choice, keep_ratio) for keep_ratio in found}

    def counts(self, server: nn.Module) -> Callable[[int], Sequence[int]]:
        """How many terms a client holds of each matrix, and of all, and how many inner channels."""
        ratios, plan = self.all_of(server), self.choice.plan(server)

        def at(place: int) -> list[int]:
            terms = [block.num_terms(ratios[place]) for block in plan.matrices.values()]
            channels = [ranks_of(layer, ratios[place]) for layer in plan.tucker.values()]
            return [*terms, sum(terms), *chain.from_iterable(channels)]

        return at


class SpectralHalf(DenseHalf):
    """Factorises the sharded matrices of a module in every round.

    Attributes:
        plan: How clients hold its layers.
        started: The matrices that the spectral start has changed, perhaps in the run that this one resumes.
    """

    costs_besides = CostsBesides(rounds_are_alike=True)

    def __init__(
        self,
        choice: SpectralSharding,
        server: nn.Module,
        plan: ModulePlan,
        rules: BufferRules | None = None,
        decisions: Decisions = None,
        state: TuckerState | None = None,
    ) -> None:
        super().__init__(server, rules)
        self.state = state
        self.choice, self.plan = choice, plan.keeping_dense(self.rules.stays, "personal")
        self.apart, self.started = self.plan.sharded_weights, frozenset((decisions or {}).get("started", ()))
        self.held_entries = self.plan.cut_biases(server)  # of biases whose outputs clients do not compute in full

    def leading(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Named tensors, cut to the entries that clients hold; views."""
        held = self.held_entries
        return {name: tensor[: held[name]] if name in held else tensor for name, tensor in tensors.items()}

    def returned(self) -> dict[str, Tensor]:
        """What clients send back besides factors, as it is now."""
        return self.leading(super().returned())

    @cached_property
    def client_side(self) -> SpectralSide:
        """Sends back factors and all that is dense, but no multipliers."""
        choice, plan = self.choice, self.plan
        vectors = (f"{name}.{factor}" for name in plan.blocks for factor in "uv")
        return choice.side(
            returned=(*self.returned(), *vectors, *(f"{name}.{part}" for name in plan.tucker for part in PARTS)),
            plan=self.plan,
            clip_tau=choice.clip_tau,
            clip_weight_lr=choice.clip_weight_lr,
            frobenius_decay=choice.frobenius_decay,
        )

    @property
    def decisions(self) -> Mapping[str, Any]:
        """Also which layers stay whole because their initial weights lack rank, and which matrices were changed."""
        decided = {**super().decisions, "missing_rank": dict(self.plan.missing_rank), "started": sorted(self.started)}
        return {name: found for name, found in decided.items() if found}

    def initialize(self, workers: Workers) -> str:
        """The spectral start, for the smallest clients unless the user says for which."""
        if not self.plan.sharded:
            return ""
        said, start = [untraced_ends(self.server, self.plan)], self.choice.spectral_start
        if start is not None:
            if start.keep_ratio is None:
                start = replace(start, keep_ratio=min(entries_of(self.choice.keep_ratio)))
            report = move_energy(self.server, self.plan, start, workers)
            self.started = frozenset(report.changed)
            said.append(str(report))
        return "\n".join(filter(None, said))

    def settle(self) -> None:
        if self.state is not None:
            self.state.settle(self.server, self.plan.tucker)

    def open(self, cohort: Cohort) -> SpectralRound:
        choice, blocks, idx = self.choice, self.plan.blocks, cohort.round_idx
        strategy, design = value_at(choice.strategy, idx), value_at(choice.design, idx)
        loses = self.started if choice.aggregation is None else frozenset[str]()

        def terms_of(name: str, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            num_terms = [blocks[name].num_terms(ratio) for ratio in cohort.groups]
            first = first_terms(matrix, num_terms, strategy, cohort) if name in loses else None
            return first or singular_terms(matrix)

        terms = of_each_matrix(self.server, self.plan, terms_of, cohort.workers)
        spectra = {name: singular_values for name, (singular_values, _, _) in terms.items()}
        num_terms_of = {name: blocks[name].num_terms for name in terms}
        draws = plan_draws(spectra, strategy, design, cohort, num_terms_of=num_terms_of)
        matrices = matrices_of(self.server, self.plan)

        def mean_of(name: str, u: Tensor, v: Tensor) -> LayerMean:
            """Begin the sums of one matrix.

            Unless the user says otherwise, a matrix that a spectral start has changed gets the mean change of the
            clients' matrices, and loses what clients never see: the start has made it small, and what training adds to
            it piles up. What only some could see shrinks.
            """
            held_rows = blocks[name].held_rows
            if name in loses:
                return MeanWithinReach(u, v, cohort, held_rows, draws[name], matrices[name])
            return (choice.aggregation or TermMeans()).open(u, v, cohort, held_rows)

        layers = {name: LayerRound(draws[name], mean_of(name, u, v)) for name, (_, u, v) in terms.items()}
        return SpectralRound(self, cohort, layers)

    def advice(self, moment: Moment, opened: Round | None = None, summary: RoundSummary | None = None) -> Sequence[str]:
        """The remedy for flat losses is given only after a spectral start: trained weights may have little to learn."""
        if isinstance(opened, SpectralRound):
            if moment is Moment.REMARK:
                return opened.equal_sub_models()
            return [*opened.noisy_sub_models(), *opened.empty_terms()]
        if moment is Moment.OTHER_LABELS and not self.plan.tucker:
            chosen, has_started = self.choice.aggregation, self.started.issuperset(self.plan.blocks)
            shrinks = has_started if chosen is None else isinstance(chosen, MatrixMeans)
            return ["what only larger clients hold shrinks in each round"] if shrinks else ()
        if moment is Moment.UNUSED_LAYERS:
            return ["keep them dense with `SpectralSharding(exclude=[...])`"]
        if moment is Moment.LARGE_UPDATES and self.choice.clip_weight_lr > 1:
            return ["bound the steps along large terms and multipliers with `clip_weight_lr=1`"]
        if moment is Moment.FLAT_LOSSES and self.started:
            rates = "if `FedAvg()` learns on the same clients, also try twice and four times its learning rate"
            return [f"clip gradients with `local_hooks=[GradientClip(1.0)]`; {rates}, then a larger keep ratio"]
        return super().advice(moment, opened, summary)


@dataclass(frozen=True, eq=False)
class LayerRound:
    """One factorised matrix in one round: a layer's weight, or a block of it.

    Attributes:
        draws: How its terms are drawn.
        mean: Holds its vectors, which have absorbed the singular values, and the sums of the clients' vectors.
        last: What was sent last to a client of each keep ratio.
    """

    draws: TermDraws
    mean: LayerMean
    last: dict[float, SentTerms] = field(default_factory=dict)

    def send(self, drawn: Tensor, keep_ratio: float) -> SentTerms:
        """What is sent of drawn terms. The last is kept for each keep ratio, whose clients often hold the same."""
        last = self.last.get(keep_ratio)
        if last is None or not torch.equal(last.drawn, drawn):
            u, v = self.mean.u[: self.mean.held_rows], self.mean.v
            multipliers, terms = self.draws.multipliers(keep_ratio, drawn).to(u.dtype), drawn.to(u.device)
            held = u.index_select(1, terms), v.index_select(0, terms)  # several times as fast as u[:, terms]
            last = SentTerms(drawn, multipliers, terms, multipliers.to(u.device), *held)
            self.last[keep_ratio] = last
        return last

    def trained(self, receipt: Receipt, upload: Upload) -> TrainedTerms:
        """What a unit sends back of its terms."""
        u, v = f"{self.draws.name}.u", f"{self.draws.name}.v"
        sent, largest = self.send(receipt.drawn[self.draws.name], receipt.capacity), upload.largest
        return TrainedTerms(sent, upload.tensors[u], upload.tensors[v], (largest[u], largest[v]))


class SpectralRound(DenseRound):
    """One open round of spectral sharding; ``layers`` has the sharded matrices by dotted name."""

    half: SpectralHalf

    def __init__(self, half: SpectralHalf, cohort: Cohort, layers: Mapping[str, LayerRound]) -> None:
        super().__init__(half, cohort)
        self.tensors, self.layers, self.tucker = half.leading(self.tensors), layers, list[TuckerRound]()
        if half.state is not None and (convolutions := half.plan.tucker):
            self.tucker = [TuckerRound(half.state, convolutions, cohort, half.choice.is_mixed)]

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.capacity_of(unit)
        tensors, terms = dict(self.tensors), {}
        for name, layer in self.layers.items():
            terms[name] = layer.draws.draw(self.cohort, unit)
            sent = layer.send(terms[name], keep_ratio)
            tensors |= {f"{name}.u": sent.u, f"{name}.v": sent.v, f"{name}.omega": sent.omega}
        for convolutions in self.tucker:
            tensors.update(convolutions.sent[keep_ratio])
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        trained = [(layer.mean, layer.trained(receipt, upload)) for layer in self.layers.values()]
        # some aggregations sum products, which may be large where the factors are not
        check_summable(*(mean.largest_summand(own) for mean, own in trained))
        super().add(receipt, upload)
        for mean, own in trained:
            mean.add(own, receipt.unit.coefficient)
        for convolutions in self.tucker:
            convolutions.add(upload, receipt.unit.coefficient, receipt.capacity)

    def positions(self, receipt: Receipt) -> dict[str, Tensor]:
        """Where a unit's terms are among all of each matrix."""
        found: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            u = layer.mean.u[: layer.mean.held_rows]
            found |= places_of_terms(receipt.drawn[name], u, layer.mean.v, f"{name}.u", f"{name}.v")
        for convolutions in self.tucker:
            found |= convolutions.places[receipt.capacity]
        return found

    @property
    def sums(self) -> Sequence[RunningMean]:
        of_layers = (layer.mean.running for layer in self.layers.values())
        return [self.mean, *of_layers, *(convolutions.running for convolutions in self.tucker)]

    def close(self) -> None:
        server, plan, held = self.half.server, self.half.plan, self.half.held_entries
        changes = self.mean.finish()  # entries that no client holds do not change
        whole = ((n, with_absent_rows(c, len(server.get_parameter(n))) if n in held else c) for n, c in changes)
        apply_mean_change(server, whole)
        for convolutions in self.tucker:
            convolutions.close()
        means = {name: layer.mean for name, layer in self.layers.items()}
        for weight, change in assembled(server, plan, lambda name: means[name].weight_change()):
            weight.grad = -change
        if any(mean.truncates for mean in means.values()):
            for weight, lost in assembled(server, plan, lambda name: means[name].truncation()):
                weight.detach().sub_(lost)

    def observed(self) -> Observed:
        """Share of terms visited, normalised inclusion entropy and the largest multiplier, if a layer is sharded."""
        if not self.layers:
            return Observed()
        visited = {name: layer.mean.visited for name, layer in self.layers.items()}
        plans = [plan for draws in self.term_draws.values() for plan in draws.groups.values()]
        entropies = [float(marginal_entropy(plan.inclusion_probs)) for plan in plans]
        num_terms = sum(map(len, visited.values()))
        figures = {
            "terms_visited": sum(int(of_matrix.sum()) for of_matrix in visited.values()) / num_terms,
            "inclusion_entropy": sum(entropies) / len(entropies),
            "largest_multiplier": max(float(plan.multipliers[plan.inclusion_probs > 0].max()) for plan in plans),
        }
        return Observed(figures, self.term_draws, visited)

    @property
    def term_draws(self) -> Mapping[str, TermDraws]:
        """How clients draw the terms of each matrix."""
        return {name: layer.draws for name, layer in self.layers.items()}

    def noisy_sub_models(self) -> Sequence[str]:
        """A warning if the sub-models of a keep ratio are far from the weights, for the worst ratio only; or nothing.

        A strategy is named as a remedy only if some choice of terms is good enough.
        """
        draws = list(self.term_draws.values())
        if not draws:
            return []
        errors = [of_matrix.client_errors() for of_matrix in draws]
        mean_errors = {ratio: fmean(of_matrix[ratio] for of_matrix in errors) for ratio in errors[0]}
        ratio = max(mean_errors, key=mean_errors.__getitem__)
        error = mean_errors[ratio]
        if error <= LARGEST_ERROR:
            return []
        least = fmean(of_matrix.missing_energy(ratio) for of_matrix in draws)
        can_start = self.half.choice.spectral_start is None
        start = "`spectral_start=ls.SpectralStart()` too, unless you compare strategies, which are equal then"
        strategy = ["ls.TopN(), which has the least error"] if least <= LARGEST_ERROR else []
        return [
            f"sub-models of keep ratio {ratio:g} {'lack most of the weight' if error < 1 else 'are mostly noise'}: the "
            f"expected squared error of one is {error:.3g} times the squared norm of the weight, averaged over the "
            f"sharded layers; with that many terms it cannot be below {least:.3g}. The spectra are flat, as those of "
            f"random weights are. Use {' or '.join(['a larger keep ratio', *strategy, *[start] * can_start])}; "
            "ls.plugin.callbacks.SpectralDiagnostics logs it as `fl/client_error`."
        ]

    def empty_terms(self) -> Sequence[str]:
        """A warning if even the smallest clients hold more terms of a matrix than its rank, up to rounding; or nothing.

        The rounding of half precision is terms that can train.
        """
        lacking = []
        for name, layer in self.layers.items():
            s, rounding = layer.draws.singular_values, min(ROUNDING, torch.finfo(layer.mean.u.dtype).eps)
            rank, fewest = int((s > rounding * s[0]).sum()), min(plan.num_terms for plan in layer.draws.groups.values())
            if rank < fewest:
                lacking.append(f"{name} (rank {rank} of {len(s)}; clients hold at least {fewest} terms)")
        if not lacking:
            return []
        return [
            f"clients hold more terms of some sharded layers than their weights have: {', '.join(lacking)}. Their rank "
            "never grows, because a term of size zero has no gradient. Keep these layers dense with `exclude=`, or "
            "initialise them differently."
        ]

    def equal_sub_models(self) -> Sequence[str]:
        """A remark if a strategy that could draw leaves nothing to chance in any layer, as others then would."""
        draws = self.term_draws.values()
        plans = [plan for of_matrix in draws for plan in of_matrix.groups.values()]
        drawn = any(bool(((plan.inclusion_probs > 0) & (plan.inclusion_probs < 1)).any()) for plan in plans)
        whole = all(plan.num_terms == len(plan.inclusion_probs) for plan in plans)
        if drawn or whole or all(isinstance(of_matrix.strategy, TopN) for of_matrix in draws):
            return []
        return [
            "All clients of a keep ratio hold the same terms, the largest ones, because singular values drop sharply "
            "after them: nothing is drawn yet, as with TopN(). To compare strategies, use `spectral_start=None` or "
            "`SpectralSharding.published(...)`; `fl/inclusion_entropy` is 0 as long as nothing is drawn."
        ]
