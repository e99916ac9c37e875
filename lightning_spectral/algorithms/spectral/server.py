"""Spectral sharding on the server: the half that is bound to a module, its rounds, and what they say to the user."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_spectral.algorithms.base import Moment, Round, ServerHalf
from lightning_spectral.algorithms.fed_avg import dense_mean
from lightning_spectral.algorithms.spectral.aggregation import (
    LayerMean,
    MeanWithinReach,
    TermAggregation,
    TermMeans,
    TrainedTerms,
)
from lightning_spectral.algorithms.spectral.device import SpectralSide
from lightning_spectral.algorithms.spectral.start import PlannedModule, SpectralStart, move_energy, naming_layer
from lightning_spectral.algorithms.term_draws import TermDraws, plan_draws
from lightning_spectral.designs import Design
from lightning_spectral.functional.figures import marginal_entropy
from lightning_spectral.functional.spectra import singular_terms
from lightning_spectral.nn.layers.terms import WeightBlock
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.nn.plan.planner import untraced_ends
from lightning_spectral.protocol.cohort import Cohort, Workers
from lightning_spectral.protocol.per_client import Schedule, value_at
from lightning_spectral.protocol.records import Download, Receipt, RoundSummary, Upload, WorkUnit
from lightning_spectral.sharding import ShardingStrategy, TopN
from lightning_spectral.sums import RunningMean

LARGEST_ERROR = 0.5  # share of the squared norm, mean over layers
ROUNDING = torch.finfo(torch.float32).eps  # a term up to this share of the largest one is zero


class SpectralHalf(ServerHalf):
    """Factorises the sharded matrices of a module in every round.

    Args:
        planned: The module and how clients hold its layers.
        device_half: The half on devices.
        sampling: How terms are drawn and averaged.
        start: The spectral start, with its keep ratio; ``None`` for none.
        started: The matrices that it has changed, in a run that goes on.
    """

    rounds_are_alike: ClassVar[bool] = True

    def __init__(
        self,
        planned: PlannedModule,
        device_half: SpectralSide,
        sampling: Sampling,
        start: SpectralStart | None,
        started: Collection[str] = (),
    ) -> None:
        super().__init__(planned.module, buffers=planned.buffers)
        self.planned = planned
        self.sampling = sampling
        self.start = start
        self.started = frozenset(started)
        self._device_half = device_half

    @property
    def plan(self) -> ModulePlan:
        return self.planned.plan

    @property
    def device_half(self) -> SpectralSide:
        return self._device_half

    @property
    def decisions(self) -> Mapping[str, Any]:
        """Also which layers stay whole because their initial weights lack rank, and which matrices were changed."""
        decided = {**super().decisions, "missing_rank": dict(self.plan.missing_rank), "started": sorted(self.started)}
        return {name: found for name, found in decided.items() if found}

    def initialize(self, workers: Workers) -> str:
        if not self.plan.sharded:
            return ""
        said = [untraced_ends(self.server, self.plan)]
        if self.start is not None:
            report = move_energy(self.planned, self.start, workers)
            self.started = frozenset(report.changed)
            said.append(str(report))
        return "\n".join(filter(None, said))

    def open(self, cohort: Cohort) -> SpectralRound:
        terms = self.planned.of_each_matrix(lambda _, matrix: singular_terms(matrix), cohort.workers)
        layers = {name: self._open(name, found, cohort) for name, found in terms.items()}
        return SpectralRound(self.planned, cohort, layers, starts_random=self.start is None)

    def _open(self, name: str, terms: tuple[Tensor, ...], cohort: Cohort) -> LayerRound:
        with naming_layer(name):
            return self.sampling.open(self.plan.blocks[name], terms, cohort, started=name in self.started)

    def advice(self, moment: Moment, summary: RoundSummary | None = None) -> Sequence[str]:
        """The remedy for flat losses is given only after a spectral start: trained weights may have little to learn."""
        if moment is Moment.UNUSED_LAYERS:
            return ["keep them dense with `SpectralSharding(exclude=[...])`"]
        if moment is Moment.LARGE_UPDATES and self.device_half.clip_weight_lr > 1:
            return ["bound the steps along large terms and multipliers with `clip_weight_lr=1`"]
        if moment is Moment.FLAT_LOSSES and self.started:
            ask = "see whether `FedAvg()` learns on the same clients"
            return [f"{ask}; if it does, try twice and four times its learning rate, then a larger keep ratio"]
        return ()


@dataclass(frozen=True, eq=False)
class LayerRound:
    """One factorised matrix in one round: a layer's weight, or a block of it.

    Attributes:
        draws: How its terms are drawn.
        mean: Holds its vectors, which have absorbed the singular values, and the sums of the clients' vectors.
    """

    draws: TermDraws
    mean: LayerMean

    def send(self, cohort: Cohort, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        """One unit's sorted term indices, shape ``(n,)``, and its tensors ``u``, ``v`` and ``omega``, by full name."""
        drawn, omega = self.draws.draw(cohort, unit)
        name, u, v = self.draws.name, self.mean.u, self.mean.v
        terms = drawn.to(u.device)
        parts = {"u": u[: self.mean.held_rows, terms], "v": v[terms], "omega": omega.to(u)}
        return terms, {f"{name}.{part}": tensor for part, tensor in parts.items()}

    def trained(self, receipt: Receipt, upload: Upload) -> TrainedTerms:
        """What a unit sends back of the terms that `send` drew, with their multipliers."""
        name = self.draws.name
        terms, u, v = receipt.drawn[name], f"{name}.u", f"{name}.v"
        return TrainedTerms(
            terms,
            upload.tensors[u],
            upload.tensors[v],
            magnitudes=(upload.largest[u], upload.largest[v]),
            multipliers=lambda: self.draws.multipliers(receipt.capacity, terms.cpu()).to(self.mean.u),
        )


@dataclass(frozen=True)
class Sampling:
    """How terms are drawn and averaged: what every round reads of `SpectralSharding`."""

    strategy: ShardingStrategy | Schedule[ShardingStrategy]
    design: Design | Schedule[Design | None] | None
    aggregation: TermAggregation | None

    def open(
        self,
        block: WeightBlock,
        terms: tuple[Tensor, ...],
        cohort: Cohort,
        *,
        started: bool,
    ) -> LayerRound:
        """Plan the draws of one matrix from its singular values, left and right vectors, and begin its sums.

        Unless the user says otherwise, a matrix that a spectral start has changed gets the mean change of the clients'
        matrices, and loses what clients never see: the start has made it small, and what training adds to it piles up.
        """
        strategy, design = value_at(self.strategy, cohort.round_idx), value_at(self.design, cohort.round_idx)
        (singular_values, u, v), name, held_rows = terms, block.name, block.held_rows
        draws = plan_draws({name: singular_values}, strategy, design, cohort, num_terms_of={name: block.num_terms})[
            name
        ]
        if self.aggregation is None and started:
            return LayerRound(draws, MeanWithinReach(u, v, cohort, held_rows, draws.reachable))
        return LayerRound(draws, (self.aggregation or TermMeans()).open(u, v, cohort, held_rows))


class SpectralRound(Round):
    """One open round of spectral sharding.

    Attributes:
        layers: The sharded matrices by dotted name.
        tensors: The tensors that travel whole, by name.
        mean: Running mean of the clients' changes to these tensors.
    """

    def __init__(
        self, planned: PlannedModule, cohort: Cohort, layers: Mapping[str, LayerRound], *, starts_random: bool = False
    ) -> None:
        self.cohort = cohort
        self.layers = layers
        self.tensors: Mapping[str, Tensor] = planned.travelling()
        self.mean = dense_mean(planned.module, planned.averaged(), cohort)
        self._planned = planned
        self._starts_random = starts_random

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        keep_ratio = self.cohort.capacity_of(unit)
        tensors, terms = dict(self.tensors), {}
        for name, layer in self.layers.items():
            terms[name], parts = layer.send(self.cohort, unit)
            tensors.update(parts)
        return Download(unit, keep_ratio, tensors), Receipt(unit, keep_ratio, terms)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        self.mean.add(upload.tensors, receipt.unit.coefficient, upload.largest)
        for layer in self.layers.values():
            layer.mean.add(layer.trained(receipt, upload), receipt.unit.coefficient)

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        """The largest of any matrix: some aggregations sum products, which may be large where the factors are not."""
        layers = self.layers.values()
        return max((layer.mean.largest_summand(layer.trained(receipt, upload)) for layer in layers), default=0.0)

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, *(layer.mean.running for layer in self.layers.values())]

    def close(self) -> None:
        self._planned.apply_mean_change(self.mean.finish())
        means = {name: layer.mean for name, layer in self.layers.items()}
        for weight, change in self._planned.assembled(lambda name: means[name].weight_change()):
            weight.grad = -change
        if any(mean.truncates for mean in means.values()):
            for weight, lost in self._planned.assembled(lambda name: means[name].truncation()):
                weight.detach().sub_(lost)

    def metrics(self) -> Mapping[str, float]:
        """Share of terms visited, normalised inclusion entropy and the largest multiplier, if a layer is sharded."""
        if not self.layers:
            return {}
        visited = self.visited_terms().values()
        plans = [plan for draws in self.term_draws.values() for plan in draws.groups.values()]
        entropies = [float(marginal_entropy(plan.inclusion_probs)) for plan in plans]
        return {
            "terms_visited": sum(int(of_matrix.sum()) for of_matrix in visited) / sum(map(len, visited)),
            "inclusion_entropy": sum(entropies) / len(entropies),
            "largest_multiplier": max(float(plan.multipliers[plan.inclusion_probs > 0].max()) for plan in plans),
        }

    @property
    def term_draws(self) -> Mapping[str, TermDraws]:
        return {name: layer.draws for name, layer in self.layers.items()}

    def visited_terms(self) -> Mapping[str, Tensor]:
        return {name: layer.mean.visited for name, layer in self.layers.items()}

    def advice(self, moment: Moment) -> Sequence[str]:
        if moment is Moment.REMARK:
            return equal_sub_models(self.term_draws)
        if moment is Moment.BEFORE_TRAINING:
            dtypes = {name: layer.mean.u.dtype for name, layer in self.layers.items()}
            return [*noisy_sub_models(self.term_draws, self._starts_random), *empty_terms(self.term_draws, dtypes)]
        return ()


def noisy_sub_models(layers: Mapping[str, TermDraws], starts_random: bool) -> Sequence[str]:
    """A warning if the sub-models of a keep ratio are far from the weights, for the worst ratio only; or nothing."""
    if not layers:
        return []
    rounds = list(layers.values())
    errors = [layer.client_errors() for layer in rounds]
    mean_errors = {ratio: fmean(of_layer[ratio] for of_layer in errors) for ratio in errors[0]}
    ratio = max(mean_errors, key=mean_errors.__getitem__)
    if mean_errors[ratio] <= LARGEST_ERROR:
        return []
    least = fmean(layer.missing_energy(ratio) for layer in rounds)
    figures = (
        f"sub-models of keep ratio {ratio:g} are mostly noise, or mostly empty: the expected squared error of one is "
        f"{mean_errors[ratio]:.3g} times the squared norm of the weight, averaged over the sharded layers; with "
        f"that many terms it cannot be below {least:.3g}. The spectra are flat, as those of random weights are."
    )
    return [f"{figures} Use {_remedies(least, starts_random)}; SpectralDiagnostics logs it as `fl/client_error`."]


def _remedies(least: float, starts_random: bool) -> str:
    """What can lower the error; a strategy is named only if some choice of terms is good enough."""
    start = ["`spectral_start=SpectralStart()`"] if starts_random else []
    strategy = ["TopN(), which has the least error"] if least <= LARGEST_ERROR else []
    return " or ".join([*start, "a larger keep ratio", *strategy])


def equal_sub_models(layers: Mapping[str, TermDraws]) -> Sequence[str]:
    """A remark if a strategy that could draw leaves nothing to chance in any layer, as others then would."""
    plans = [plan for layer in layers.values() for plan in layer.groups.values()]
    certain = all(bool(((plan.inclusion_probs == 0) | (plan.inclusion_probs == 1)).all()) for plan in plans)
    by_choice = all(isinstance(layer.strategy, TopN) for layer in layers.values())
    whole = all(plan.num_terms == len(plan.inclusion_probs) for plan in plans)
    if by_choice or whole or not certain:
        return []
    return [
        "All clients of a keep ratio hold the same terms, the largest ones, because the spectra fall steeply after "
        "them; so far, strategies do not differ. To compare them, use `spectral_start=None` or "
        "`SpectralSharding.published(...)`; `fl/inclusion_entropy` is 0 as long as nothing is drawn."
    ]


def empty_terms(layers: Mapping[str, TermDraws], dtypes: Mapping[str, torch.dtype]) -> Sequence[str]:
    """A warning if even the smallest clients hold more terms of a matrix than its rank, up to rounding; or nothing."""
    ranks = {name: _rank(layer, dtypes[name]) for name, layer in layers.items()}
    fewest = {name: min(plan.num_terms for plan in layer.groups.values()) for name, layer in layers.items()}
    lacking = [
        f"{name} (rank {rank} of {len(layers[name].singular_values)}; clients hold at least {fewest[name]} terms)"
        for name, rank in ranks.items()
        if rank < fewest[name]
    ]
    if not lacking:
        return []
    return [
        f"clients hold more terms of some sharded layers than their weights have: {', '.join(lacking)}. Their rank "
        "never grows, because a term of size zero has no gradient. Keep these layers dense with `exclude=`, or "
        "initialise them differently."
    ]


def _rank(layer: TermDraws, dtype: torch.dtype) -> int:
    """Rank of the weight up to rounding; the rounding of half precision is terms that can train."""
    s = layer.singular_values
    return int((s > min(ROUNDING, torch.finfo(dtype).eps) * s[0]).sum())
