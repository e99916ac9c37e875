"""One open round of spectral sharding: factors, probabilities and running sums, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs import Design, FittedDesign
from lightning_spectral.federated.statistics import MeanChange, MeanTermChange
from lightning_spectral.functional.aggregation import weight_change
from lightning_spectral.functional.diagnostics import marginal_entropy
from lightning_spectral.functional.factors import absorb, factorize, num_terms_for
from lightning_spectral.sharding import ShardingStrategy


@dataclass(frozen=True)
class GroupPlan:
    """How the clients of one keep ratio get their terms of one layer.

    Attributes:
        inclusion_probs: Shape ``(N,)``, float64, on the CPU.
        multipliers: Shape ``(N,)``, float64, on the CPU.
        design: Fitted once; every client's draw comes from it.
    """

    inclusion_probs: Tensor
    multipliers: Tensor
    design: FittedDesign


@dataclass(frozen=True)
class LayerRound:
    """One sharded layer in one round.

    Attributes:
        u: Left vectors with absorbed singular values, shape ``(c_out, N)``.
        v: Right vectors with absorbed singular values, shape ``(N, c_in k)``.
        groups: A plan for each keep ratio of the round.
        mean: Running sums of what comes back.
    """

    u: Tensor
    v: Tensor
    groups: Mapping[float, GroupPlan]
    mean: MeanTermChange

    def draw(self, keep_ratio: float, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """One client's sorted term indices, shape ``(n,)``, and its tensors ``u``, ``v`` and ``omega``."""
        plan = self.groups[keep_ratio]
        drawn = plan.design.draw(1, generator)[0]
        omega = plan.multipliers[drawn].to(self.u)
        terms = drawn.to(self.u.device)
        return terms, {"u": self.u[:, terms], "v": self.v[terms], "omega": omega}

    def weight_change(self) -> Tensor:
        """Change of the weight as a matrix, float64: exactly zero where no visited term moved."""
        visited, u_change, v_change = self.mean.finish()
        return weight_change(self.u[:, visited].double(), self.v[visited].double(), u_change, v_change)


@dataclass(frozen=True)
class SpectralRound:
    """One open round.

    Attributes:
        layers: The sharded layers by dotted name.
        tensors: What travels whole, by name.
        mean: Running sum of what comes back of it.
    """

    layers: Mapping[str, LayerRound]
    tensors: Mapping[str, Tensor]
    mean: MeanChange

    def diagnostics(self) -> dict[str, float]:
        """Figures to log: see `SpectralSharding.diagnostics`."""
        visited = sum(int((layer.mean.weight > 0).sum()) for layer in self.layers.values())
        total = sum(len(layer.mean.weight) for layer in self.layers.values())
        plans = [plan for layer in self.layers.values() for plan in layer.groups.values()]
        entropies = [float(marginal_entropy(plan.inclusion_probs)) for plan in plans]
        largest = max(float(plan.multipliers[plan.inclusion_probs > 0].max()) for plan in plans)
        return {
            "terms_visited": visited / total,
            "inclusion_entropy": sum(entropies) / len(entropies),
            "largest_multiplier": largest,
        }


def open_layer(
    weight: Tensor, strategy: ShardingStrategy, design: Design | None, cohort_sizes: Mapping[float, int]
) -> LayerRound:
    """Factorise one weight and plan every group's draws.

    Args:
        weight: Shape ``(c_out, c_in, ...)``, finite.
        strategy: Gives probabilities and multipliers.
        design: Draws; ``None`` for the strategy's own.
        cohort_sizes: Number of this round's clients of each keep ratio.
    """
    factors = factorize(weight)
    u, v = absorb(factors, weight.dtype)
    singular_values = factors.s.cpu()
    groups = {r: _plan(singular_values, r, size, strategy, design) for r, size in cohort_sizes.items()}
    return LayerRound(u, v, groups, MeanTermChange(u, v))


def _plan(
    singular_values: Tensor, keep_ratio: float, cohort_size: int, strategy: ShardingStrategy, design: Design | None
) -> GroupPlan:
    num_terms = num_terms_for(len(singular_values), keep_ratio)
    inclusion_probs, multipliers = strategy(singular_values, num_terms, cohort_size)
    chosen = design if design is not None else strategy.own_design(singular_values, num_terms)
    return GroupPlan(inclusion_probs, multipliers, chosen.fit(inclusion_probs))
