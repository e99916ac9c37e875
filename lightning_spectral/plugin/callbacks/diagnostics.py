"""Diagnostics of a round's sampling, computed before any client trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_spectral.algorithms.base import Round
from lightning_spectral.algorithms.term_draws import GroupPlan, TermDraws
from lightning_spectral.arguments import Whole
from lightning_spectral.functional.figures.discrepancy import (
    cohort_discrepancy,
    coordinated_discrepancy,
    expected_coverage,
)
from lightning_spectral.functional.figures.effective_rank import entropy_rank, participation_rank, stable_rank
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.plugin.host import Trained


class SpectralDiagnostics(RoundCallback):
    """Logs, averaged over the sharded layers, how well a round's sub-models represent the weights.

    - ``fl/discrepancy``: expected squared Frobenius error of the cohort's average over the weight's squared norm.
    - ``fl/client_error``: the same error for a single client's sub-model, averaged over the clients.
    - ``fl/expected_coverage``: expected share of terms held by some client (``fl/terms_visited`` is the realised one).
    - ``fl/entropy_rank``, ``fl/participation_rank``, ``fl/stable_rank``: effective ranks, as shares of N.

    It also logs the strategy's own `ShardingStrategy.figures`, such as ``fl/effective_cohort`` of `EffectiveCohort`, as
    means over keep ratios: for each layer, as ``fl/effective_cohort/<layer>``, and averaged over the layers.

    With an algorithm that does not shard layers, it logs nothing. The figures are available as pure functions: see
    `lightning_spectral.functional`.

    Args:
        every_n_rounds: Log in rounds 0, n, 2n, ...

    Attributes:
        by_layer: The same figures for each layer in the last round that had any, by model and layer.
    """

    def __init__(self, every_n_rounds: int = 1) -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        self.by_layer: dict[str, dict[str, dict[str, float]]] = {}

    def is_due(self, round_idx: int) -> bool:
        return round_idx % self.every_n_rounds == 0

    def on_round_start(self, trainer: pl.Trainer, pl_module: Trained, opened: Any) -> None:  # type: ignore[override]
        if opened.term_draws and self.is_due(trainer.current_epoch):
            by_layer = self.by_layer[pl_module.name] = layer_figures(opened)
            figures = spectral_figures(opened, by_layer)
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)


def layer_figures(opened: Round) -> dict[str, dict[str, float]]:
    """The figures of each sharded layer in one open round."""
    return {name: _layer_figures(layer) for name, layer in opened.term_draws.items()}


def spectral_figures(opened: Round, by_layer: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, float]:
    """The figures of one open round, by the names under which they are logged."""
    by_layer = layer_figures(opened) if by_layer is None else by_layer
    chosen = {name: _chosen_figures(layer) for name, layer in opened.term_draws.items()}
    means = {**_means(by_layer.values()), **_means(chosen.values())}
    return {
        **{f"fl/{name}": value for name, value in means.items()},
        **{f"fl/{name}/{layer}": value for layer, figures in chosen.items() for name, value in figures.items()},
    }


def _means(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each named value over those that have it."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for one in figures:
        for name, value in one.items():
            by_name[name].append(value)
    return {name: fmean(values) for name, values in by_name.items()}


def _chosen_figures(layer: TermDraws) -> dict[str, float]:
    """The strategy's own figures on its choices for one layer, averaged over keep ratios."""
    plans, s = layer.groups.values(), layer.singular_values
    return _means(layer.strategy.figures(s, plan.num_terms, float(plan.num_clients)) for plan in plans)


def _client_error(layer: TermDraws) -> float:
    num_clients = {ratio: plan.num_clients for ratio, plan in layer.groups.items()}
    total = sum(error * num_clients[ratio] for ratio, error in layer.client_errors().items())
    return total / sum(num_clients.values())


def _layer_figures(layer: TermDraws) -> dict[str, float]:
    s, num_singular = layer.singular_values, len(layer.singular_values)
    squared_norm = float((s**2).sum())
    return {
        "discrepancy": float(_discrepancy(layer)) / squared_norm if squared_norm else 0.0,
        "client_error": _client_error(layer),
        "expected_coverage": float(_coverage(layer)),
        "entropy_rank": entropy_rank(s) / num_singular,
        "participation_rank": participation_rank(s) / num_singular,
        "stable_rank": stable_rank(s) / num_singular,
    }


def _discrepancy(layer: TermDraws) -> Tensor:
    """Exact for independent clients and for one coordinated group; several such groups count as independent clients."""
    plans = list(layer.groups.values())
    if len(plans) == 1 and plans[0].dealt is not None:
        plan, s = plans[0], layer.singular_values
        return coordinated_discrepancy(s, plan.inclusion_probs, plan.multipliers, plan.num_clients, plan.weights)
    probs = torch.cat([plan.inclusion_probs.repeat(plan.num_clients, 1) for plan in plans])
    multipliers = torch.cat([plan.multipliers.repeat(plan.num_clients, 1) for plan in plans])
    weights = torch.cat([plan.weights for plan in plans])
    return cohort_discrepancy(layer.singular_values, probs, multipliers, weights)


def _coverage(layer: TermDraws) -> Tensor:
    return expected_coverage(torch.cat([_holders(plan) for plan in layer.groups.values()]))


def _holders(plan: GroupPlan) -> Tensor:
    """Probabilities of independent events, one of which happens if a client of the group holds a term."""
    if plan.dealt is None:
        return plan.inclusion_probs.repeat(plan.num_clients, 1)
    return (plan.num_clients * plan.inclusion_probs).clamp(max=1.0)[None]  # floor(C pi) clients hold it, or one more
