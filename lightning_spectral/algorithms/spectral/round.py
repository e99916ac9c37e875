"""One open round of spectral sharding: drawn terms and running sums, matrix by matrix, and dense tensors whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.algorithms.base import Moment, Round
from lightning_spectral.algorithms.dense_mean import dense_mean
from lightning_spectral.algorithms.spectral.aggregation import (
    LayerMean,
    MeanWithinReach,
    TermAggregation,
    TermMeans,
    TrainedTerms,
)
from lightning_spectral.algorithms.spectral.checks import empty_terms, equal_sub_models, noisy_sub_models
from lightning_spectral.algorithms.spectral.planned_module import PlannedModule
from lightning_spectral.algorithms.term_draws import TermDraws, plan_draws
from lightning_spectral.designs import Design
from lightning_spectral.functional.figures import marginal_entropy
from lightning_spectral.nn.layers.blocks import WeightBlock
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, Receipt, Upload, WorkUnit
from lightning_spectral.protocol.schedule import Schedule, value_at
from lightning_spectral.sharding import ShardingStrategy
from lightning_spectral.sums import RunningMean


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
        keep_ratio = self.cohort.keep_ratio_of(unit)
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
