"""One open round of spectral sharding: factors, probabilities and running sums, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.algorithms.term_aggregation import LayerMean, TrainedTerms
from lightning_spectral.designs import Design, FittedDesign
from lightning_spectral.functional.factors import num_terms_for
from lightning_spectral.functional.figures.discrepancy import group_discrepancy
from lightning_spectral.functional.figures.effective_rank import marginal_entropy
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Receipt, Upload
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.protocol.statistics import MeanChange
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sharding import ShardingStrategy

TINY = torch.finfo(torch.float64).tiny  # keeps the missing share of a weight of zeros at zero


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """How the clients of one keep ratio draw their terms of one layer.

    Attributes:
        inclusion_probs: Shape ``(N,)``, float64, on the CPU.
        multipliers: Shape ``(N,)``, float64, on the CPU.
        design: Fitted once; every client's draw comes from it.
        num_clients: Number of clients of the group.
        cohort_size: Number of clients that the strategy was given: the same, or Kish's effective number.
        dealt: The terms of each unit, by its key, for a design that draws for the whole group at once.
    """

    inclusion_probs: Tensor
    multipliers: Tensor
    design: FittedDesign
    num_clients: int
    cohort_size: float
    dealt: Mapping[tuple[int, str], Tensor] | None = None

    @property
    def num_terms(self) -> int:
        """Number n of terms that a client of the group holds."""
        return round(float(self.inclusion_probs.sum()))


@dataclass(frozen=True, eq=False)
class LayerRound:
    """One factorised matrix in one round: a layer's weight, or a block of it.

    Attributes:
        name: Its dotted name.
        singular_values: Shape ``(N,)``, float64, on the CPU.
        groups: A plan for each keep ratio of the round.
        mean: Holds the vectors, which have absorbed the singular values, and the sums of the clients' vectors.
        strategy: Scales the drawn terms.
    """

    name: str
    singular_values: Tensor
    groups: Mapping[float, GroupPlan]
    mean: LayerMean
    strategy: ShardingStrategy

    def draw(self, cohort: Cohort, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        """One unit's sorted term indices, shape ``(n,)``, and its tensors ``u``, ``v`` and ``omega``."""
        plan = self.groups[cohort.keep_ratio_of(unit)]
        if plan.dealt is None:
            generator = derived_generator(cohort.seed, "terms", cohort.round_idx, *unit.ids, self.name)
            drawn = plan.design.draw(1, generator)[0]
        else:
            drawn = plan.dealt[unit.key]
        u, v = self.mean.u, self.mean.v
        terms, omega = drawn.to(u.device), self._multipliers(plan, drawn)
        return terms, {"u": u[: self.mean.held_rows, terms], "v": v[terms], "omega": omega}

    def trained(self, receipt: Receipt, upload: Upload) -> TrainedTerms:
        """What a unit sends back of the terms that `draw` returned, with their multipliers."""
        plan, terms = self.groups[receipt.capacity], receipt.drawn[self.name]
        u, v = f"{self.name}.u", f"{self.name}.v"
        return TrainedTerms(
            terms,
            upload.tensors[u],
            upload.tensors[v],
            magnitudes=(upload.largest[u], upload.largest[v]),
            multipliers=lambda: self._multipliers(plan, terms.cpu()),
        )

    def _multipliers(self, plan: GroupPlan, drawn: Tensor) -> Tensor:
        return self.strategy.drawn_multipliers(self.singular_values, plan.multipliers, drawn).to(self.mean.u)

    def client_errors(self) -> dict[float, float]:
        r"""Expected :math:`\|W - \hat W\|_F^2 / \|W\|_F^2` of a single client's sub-model, for each keep ratio.

        For `Scaled`, it is the error with the multipliers of the expected draw.
        """
        s = self.singular_values
        squared_norm = (s**2).sum().clamp(min=TINY)
        return {
            ratio: float(group_discrepancy(s, plan.inclusion_probs, plan.multipliers, cohort_size=1) / squared_norm)
            for ratio, plan in self.groups.items()
        }

    def missing_energy(self, keep_ratio: float) -> float:
        """Share of the squared norm beyond the n largest terms: the least error of a sub-model of that keep ratio."""
        squares = self.singular_values**2  # descending
        return float(squares[self.groups[keep_ratio].num_terms :].sum() / squares.sum().clamp(min=TINY))

    def weight_change(self) -> Tensor:
        """Change of the weight as a matrix, float64."""
        return self.mean.weight_change()


@dataclass(frozen=True, eq=False)
class SpectralRound:
    """One open round of spectral sharding.

    Attributes:
        cohort: The clients that take part.
        plan: How clients hold each layer.
        layers: The sharded layers by dotted name.
        tensors: The tensors that travel whole, by name.
        mean: Running mean of the clients' changes to these tensors.
    """

    cohort: Cohort
    plan: ModulePlan
    layers: Mapping[str, LayerRound]
    tensors: Mapping[str, Tensor]
    mean: MeanChange

    def diagnostics(self) -> dict[str, float]:
        """Figures to log: see `SpectralSharding.diagnostics`; none if no layer is sharded."""
        if not self.layers:
            return {}
        visited = sum(int(layer.mean.visited.sum()) for layer in self.layers.values())
        total = sum(len(layer.singular_values) for layer in self.layers.values())
        plans = [plan for layer in self.layers.values() for plan in layer.groups.values()]
        entropies = [float(marginal_entropy(plan.inclusion_probs)) for plan in plans]
        largest = max(float(plan.multipliers[plan.inclusion_probs > 0].max()) for plan in plans)
        return {
            "terms_visited": visited / total,
            "inclusion_entropy": sum(entropies) / len(entropies),
            "largest_multiplier": largest,
        }


def open_layer(
    name: str,
    singular_values: Tensor,
    mean: LayerMean,
    strategy: ShardingStrategy,
    design: Design | None,
    cohort: Cohort,
    sizes: Mapping[float, float],
    granularity: int = 1,
) -> LayerRound:
    """Plan every group's draws of one factorised matrix.

    Args:
        name: Its dotted name.
        singular_values: Shape ``(N,)``, descending.
        mean: Holds its vectors, and will hold the sums of the clients'.
        strategy: Gives probabilities and multipliers.
        design: Draws terms; ``None`` for the strategy's own.
        cohort: The clients that take part.
        sizes: For each keep ratio, the number of clients that the strategy is given.
        granularity: Numbers of terms are rounded up to a multiple of this.
    """
    (opened,) = open_layers({name: (singular_values, mean)}, strategy, design, cohort, sizes, granularity)
    return opened


def open_layers(
    layers: Mapping[str, tuple[Tensor, LayerMean]],
    strategy: ShardingStrategy,
    design: Design | None,
    cohort: Cohort,
    sizes: Mapping[float, float],
    granularity: int = 1,
) -> list[LayerRound]:
    """Plan every group's draws of several matrices, whose designs are fitted together.

    Args:
        layers: For each matrix, by its name, its singular values and its mean.
        strategy: As for `open_layer`.
        design: As for `open_layer`.
        cohort: As for `open_layer`.
        sizes: As for `open_layer`.
        granularity: As for `open_layer`.
    """
    drafts: list[_Draft] = []
    for name, (singular_values, _) in layers.items():
        s = singular_values.cpu()
        num_terms = {ratio: num_terms_for(len(s), ratio, granularity) for ratio in cohort.groups}
        answers = strategy.for_groups(s, list(num_terms.values()), [sizes[ratio] for ratio in num_terms])
        for (ratio, n), answer in zip(num_terms.items(), answers, strict=True):
            chosen = design if design is not None else strategy.own_design(s, n)
            drafts.append(_Draft(name, ratio, *answer, chosen))
    plans: dict[str, dict[float, GroupPlan]] = {name: {} for name in layers}
    for draft, fitted in zip(drafts, _fit(drafts), strict=True):
        plans[draft.name][draft.keep_ratio] = draft.plan(fitted, cohort, sizes[draft.keep_ratio])
    return [LayerRound(name, s.cpu(), plans[name], mean, strategy) for name, (s, mean) in layers.items()]


class _Draft(NamedTuple):
    """One group's plan for one matrix, before its design is fitted."""

    name: str
    keep_ratio: float
    inclusion_probs: Tensor
    multipliers: Tensor
    design: Design

    def plan(self, fitted: FittedDesign, cohort: Cohort, size: float) -> GroupPlan:
        units, probs = cohort.groups[self.keep_ratio], self.inclusion_probs
        dealt = None
        if self.design.draws_cohort:
            ids = (cohort.round_idx, str(self.keep_ratio), self.name)
            generator = derived_generator(cohort.seed, "terms of a group", *ids)
            dealt = dict(zip((unit.key for unit in units), fitted.draw(len(units), generator), strict=True))
        multipliers = self.design.multipliers(probs, self.multipliers, len(units))
        return GroupPlan(probs, multipliers, fitted, len(units), size, dealt)


def _fit(drafts: Sequence[_Draft]) -> list[FittedDesign]:
    """Fit the designs of all drafts; consecutive drafts of one design are fitted together."""
    groups = [list(alike) for _, alike in groupby(drafts, key=lambda draft: id(draft.design))]
    return [fitted for own in groups for fitted in own[0].design.fit_all([draft.inclusion_probs for draft in own])]
