"""Spectral model sharding: clients train sampled singular terms of every affine layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.by_keep_ratio import ByKeepRatio
from lightning_spectral.algorithms.classic import ClassicAlgorithm
from lightning_spectral.algorithms.cut_outputs import leading_entries, of_whole_tensors
from lightning_spectral.algorithms.decomposition import (
    NamedMatrix,
    decomposition_cost,
    naming_layer,
    sharded_matrices,
)
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.spectral_checks import (
    check_by_round,
    cutting,
    excluding,
    warn_of_optimizer,
    warn_of_whole_layers,
)
from lightning_spectral.algorithms.spectral_round import LayerRound, SpectralRound, open_layer
from lightning_spectral.algorithms.spectral_side import SpectralSide
from lightning_spectral.algorithms.spectral_start import SpectralStart, StartReport, spectral_start
from lightning_spectral.algorithms.sub_model_error import empty_terms, noisy_sub_models
from lightning_spectral.algorithms.term_aggregation import TermAggregation, TermMeans
from lightning_spectral.arguments import Number, as_patterns, check_fields, flag
from lightning_spectral.client.side import ClientSide
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.functional.factors import KEEP_RATIO, singular_terms
from lightning_spectral.functional.local_training import TAU, WEIGHT_LR
from lightning_spectral.nn.layers.blocks import assemble, by_parameter
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.validate import check_layers, plan_of, untraced_ends
from lightning_spectral.protocol.cohort import Cohort, SharesWork
from lightning_spectral.protocol.exchange import apply_mean_change, averaged_tensors, travelling_tensors
from lightning_spectral.protocol.per_client import (
    PerClient,
    check_per_client,
    entries_of,
)
from lightning_spectral.protocol.records import Download, Receipt, Upload
from lightning_spectral.protocol.schedule import Schedule, value_at
from lightning_spectral.protocol.statistics import RunningMean
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sharding import Collective, ShardingStrategy


@dataclass(frozen=True)
class SpectralSharding(ByKeepRatio, ClassicAlgorithm[SpectralRound]):
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
        layers: Which layers are sharded, how finely, and which buffers are averaged; or the plan that `validate`
            returned, which fixes the outcome for every layer. Given choices, the plan is made when training starts,
            with a traced forward pass if the module has an ``example_input_array``.
        clip_weight_lr: Bound on the learning rate at which a step moves the weight along a term, in units of the
            nominal one; ``float("inf")`` for none. Without a bound, the weight moves along a term of singular value s
            at 2 omega^2 s times the rate of a dense layer; with 1, never faster than in a dense layer.
        spectral_start: Moves the energy of random weights into their first terms before the first round; ``None`` to
            train from the weights as they are. Weights that look trained are unchanged.
        weigh_clients: Whether the strategy is given Kish's effective number of clients, which accounts for unequal
            numbers of examples, instead of their actual number.
        output_ratio: Share q of each sharded layer's output channels, the leading ones, that a client computes. The
            others are zero on the client and take no memory there. Short for ``layers=LayerChoices(output_ratio=...)``,
            where it is stored.
        aggregation: How the clients' sub-models are combined into one weight: `TermMeans`, or `MatrixMeans` as in
            FedHM.

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

    updates_have_norms: ClassVar[bool] = True

    strategy: ShardingStrategy | Schedule[ShardingStrategy] = field(default_factory=Collective)
    keep_ratio: PerClient[float] = 0.2
    design: Design | Schedule[Design | None] | None = None
    clip_tau: float = 10.0
    frobenius_decay: float = 1e-4
    exclude: Sequence[str] = field(default=(), repr=False, compare=False)  # moves into `layers`; empty afterwards
    layers: LayerChoices | ModulePlan = LayerChoices()
    weigh_clients: bool = False
    clip_weight_lr: float = 1.0
    spectral_start: SpectralStart | None = SpectralStart()
    output_ratio: float | None = field(default=None, repr=False, compare=False)  # also moves into `layers`
    aggregation: TermAggregation = field(default_factory=TermMeans)

    def __post_init__(self) -> None:
        check_fields(
            self,
            keep_ratio=partial(check_per_client, rule=KEEP_RATIO),
            clip_tau=TAU,
            frobenius_decay=Number(at_least=0),
            weigh_clients=flag,
            clip_weight_lr=WEIGHT_LR,
            exclude=as_patterns,
        )
        check_by_round(self.strategy, self.design)
        if self.spectral_start is not None:
            check_is("spectral_start", self.spectral_start, SpectralStart)
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
        """The paper's recipe: weights as they are initialised, and no bound on the learning rate of the weight.

        Args:
            strategy: As for the class; ``None`` for `Collective`.
            keep_ratio: As for the class.
            **options: Further arguments of the class.

        Example:
            >>> SpectralSharding.published(keep_ratio=0.1).spectral_start is None
            True
        """
        chosen = Collective() if strategy is None else strategy
        return cls(chosen, keep_ratio, **{"clip_weight_lr": math.inf, "spectral_start": None, **options})

    def plan(self, server: nn.Module) -> ModulePlan:
        """How clients hold every layer and buffer of ``server``.

        Raises:
            ValueError: If ``server`` cannot be sharded, with all problems at once, or if ``layers`` is the plan of
                another module.
        """
        return plan_of(server, self.layers)

    def check(self, server: nn.Module) -> None:
        """Raise ``ValueError`` if ``server`` cannot be sharded, or ``layers`` is the plan of another module.

        Warns about layers of which every client would hold all terms, and if no layer is sharded at all.
        """
        warn_of_whole_layers(server, self.plan(server))

    def prepare(self, server: nn.Module) -> SpectralSharding:
        """Make the plan of ``server`` the algorithm's ``layers``, once for all rounds."""
        return replace(self, layers=self.plan(server))

    def decisions(self) -> Mapping[str, Any]:
        """The layers that stay whole because their initial weights lack rank."""
        assert isinstance(self.layers, ModulePlan), "known from `prepare` on"
        return {"missing_rank": dict(found)} if (found := self.layers.missing_rank) else {}

    def resume(self, server: nn.Module, decisions: Mapping[str, Any]) -> SpectralSharding:
        """`prepare`, with the same layers whole even if their weights have gained rank."""
        return replace(self, layers=plan_of(server, self.layers, missing_rank=decisions.get("missing_rank", {})))

    def leave_untrained(self, server: nn.Module, names: Collection[str]) -> SpectralSharding:
        """Keep layers dense, as frozen ones are, if no optimizer steps one of their weights."""
        return replace(self, layers=self.plan(server).keeping_dense(names, "in no optimizer"))

    def initialize(self, server: nn.Module, workers: SharesWork) -> str:
        """Apply the spectral start, if there is one; and say what a plan without a forward pass assumes."""
        if not (plan := self.plan(server)).sharded:
            return ""
        said = [untraced_ends(server, plan)]
        if (start := self.spectral_start) is not None:
            said.append(str(self._started(server, start, workers)))
        return "\n".join(filter(None, said))

    def _started(self, server: nn.Module, start: SpectralStart, workers: SharesWork) -> StartReport:
        share = min(entries_of(self.keep_ratio)) if start.keep_ratio is None else start.keep_ratio
        return spectral_start(
            server, share, tail=start.tail, trained=start.trained, layers=self.layers, workers=workers
        )

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Warn about optimizers that undo the clip, and say where the optimizer's weight decay goes."""
        if self.plan(server).sharded:
            warn_of_optimizer(template, self.clip_tau, self.frobenius_decay)

    def client_side(self, server: nn.Module) -> ClientSide:
        """The device half: sub-models, and optimizers that decay and clip their factors."""
        plan = self.plan(server)
        dense = tuple(averaged_tensors(server, plan.sharded_weights, plan.kept_buffers))
        return SpectralSide(plan, dense, self.clip_tau, self.clip_weight_lr, self.frobenius_decay)

    def open(self, server: nn.Module, state: nn.Module | None, cohort: Cohort) -> SpectralRound:
        """Factorise every sharded matrix once, and compute probabilities and multipliers for each keep ratio."""
        plan = self.plan(server)
        terms = cohort.workers.share_out(sharded_matrices(server, plan), _singular_terms, decomposition_cost)
        granularity = plan.choices.term_granularity
        named_terms = zip(plan.blocks.items(), terms, strict=True)
        layers = {
            name: self._open(name, found, cohort, granularity, block.held_rows) for (name, block), found in named_terms
        }
        cuts = plan.cut_biases(server)
        averaged = averaged_tensors(server, plan.sharded_weights, plan.kept_buffers)
        mean = dense_mean(server, leading_entries(averaged, cuts), cohort)
        tensors = leading_entries(travelling_tensors(server, plan.sharded_weights), cuts)
        return SpectralRound(cohort, plan, layers, tensors, mean)

    def _open(
        self, name: str, terms: tuple[Tensor, ...], cohort: Cohort, granularity: int, held_rows: int | None
    ) -> LayerRound:
        sizes = {
            keep_ratio: cohort.effective_size(units) if self.weigh_clients else float(len(units))
            for keep_ratio, units in cohort.groups.items()
        }
        with naming_layer(name):
            strategy, design = value_at(self.strategy, cohort.round_idx), value_at(self.design, cohort.round_idx)
            singular_values, u, v = terms
            mean = self.aggregation.open(u, v, cohort, held_rows)
            return open_layer(name, singular_values, mean, strategy, design, cohort, sizes, granularity)

    def send(self, opened: SpectralRound, unit: WorkUnit) -> tuple[Download, Receipt]:
        """Draw the unit's terms of every layer, independently."""
        keep_ratio = opened.cohort.keep_ratio_of(unit)
        tensors, terms = dict(opened.tensors), {}
        for name, layer in opened.layers.items():
            terms[name], parts = layer.draw(opened.cohort, unit)
            tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, opened: SpectralRound, receipt: Receipt, upload: Upload) -> None:
        """Add the client's change: dense tensors whole, sharded layers by their terms."""
        opened.mean.add(upload.tensors, receipt.unit.coefficient, upload.largest)
        for layer in opened.layers.values():
            layer.mean.add(layer.trained(receipt, upload), receipt.unit.coefficient)

    def largest_summand(self, opened: SpectralRound, receipt: Receipt, upload: Upload) -> float:
        """The largest of any layer: some aggregations sum products, which may be large where the factors are not."""
        layers = opened.layers.values()
        return max((layer.mean.largest_summand(layer.trained(receipt, upload)) for layer in layers), default=0.0)

    def running_means(self, opened: SpectralRound) -> Sequence[RunningMean]:
        """One sum over the dense tensors, and one for each sharded matrix."""
        return [opened.mean, *(layer.mean.running for layer in opened.layers.values())]

    def close(self, server: nn.Module, state: nn.Module | None, opened: SpectralRound) -> None:
        """Set the pseudo-gradients of dense tensors, and of sharded weights from the aggregation of their terms."""
        cuts = opened.plan.cut_biases(server)
        apply_mean_change(server, of_whole_tensors(opened.mean.finish(), server, cuts))
        for name, blocks in by_parameter(list(opened.plan.blocks.values())):
            weight = server.get_parameter(name)
            changes = [opened.layers[block.name].weight_change().to(weight.dtype) for block in blocks]
            weight.grad = -assemble(blocks, changes, weight)

    def concerns(self, opened: SpectralRound) -> Sequence[str]:
        """Warnings if the sub-models of a keep ratio retain little of the weights, or hold empty terms."""
        noisy = noisy_sub_models(opened.layers, starts_random=self.spectral_start is None)
        return [*noisy, *empty_terms(opened.layers)]

    def diagnostics(self, opened: SpectralRound) -> Mapping[str, float]:
        """Share of terms visited, normalised inclusion entropy and the largest multiplier."""
        return opened.diagnostics()


def _singular_terms(named_matrix: NamedMatrix) -> tuple[Tensor, ...]:
    name, matrix = named_matrix
    with naming_layer(name):
        return singular_terms(matrix)
