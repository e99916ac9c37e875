"""Diagnostics of a round's sampling, computed before any client trains."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_spectral.algorithms.spectral_round import GroupPlan, LayerRound, SpectralRound
from lightning_spectral.functional.figures.discrepancy import (
    cohort_discrepancy,
    coordinated_discrepancy,
    expected_coverage,
)
from lightning_spectral.functional.figures.effective_rank import entropy_rank, participation_rank, stable_rank
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback


class SpectralDiagnostics(RoundCallback):
    """Logs, averaged over the sharded layers, how well a round's sub-models represent the weights.

    - ``fl/discrepancy``: expected squared Frobenius error of the cohort's average over the weight's squared norm.
    - ``fl/expected_coverage``: expected share of terms that a client holds (``fl/terms_visited`` is the realised one).
    - ``fl/entropy_rank``, ``fl/participation_rank``, ``fl/stable_rank``: effective ranks, each a share of N.

    With an algorithm that shards nothing it logs nothing. The figures are pure functions: see
    `lightning_spectral.functional`.

    Args:
        every_n_rounds: Log in rounds 0, n, 2n, ...

    Raises:
        ValueError: If ``every_n_rounds`` is below 1.
    """

    def __init__(self, every_n_rounds: int = 1) -> None:
        if every_n_rounds < 1:
            raise ValueError(f"`every_n_rounds` must be at least 1, got {every_n_rounds}.")
        self.every_n_rounds = every_n_rounds

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, opened: Any) -> None:
        """Compute the figures of the round and log them."""
        if isinstance(opened, SpectralRound) and trainer.current_epoch % self.every_n_rounds == 0:
            values = {name: torch.tensor(value).double() for name, value in spectral_figures(opened).items()}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)


def spectral_figures(opened: SpectralRound) -> dict[str, float]:
    """The figures of one open round, by the names under which they are logged."""
    per_layer = [_layer_figures(layer) for layer in opened.layers.values()]
    return {f"fl/{name}": fmean(figures[name] for figures in per_layer) for name in per_layer[0]}


def _layer_figures(layer: LayerRound) -> dict[str, float]:
    s, num_singular = layer.singular_values, len(layer.singular_values)
    squared_norm = float((s**2).sum())
    return {
        "discrepancy": float(_discrepancy(layer)) / squared_norm if squared_norm else 0.0,
        "expected_coverage": float(_coverage(layer)),
        "entropy_rank": entropy_rank(s) / num_singular,
        "participation_rank": participation_rank(s) / num_singular,
        "stable_rank": stable_rank(s) / num_singular,
    }


def _discrepancy(layer: LayerRound) -> Tensor:
    """Exact for independent clients and for one coordinated group; several such groups count as independent clients."""
    plans = list(layer.groups.values())
    if len(plans) == 1 and plans[0].dealt is not None:
        plan = plans[0]
        return coordinated_discrepancy(layer.singular_values, plan.inclusion_probs, plan.multipliers, plan.num_clients)
    probs = torch.cat([plan.inclusion_probs.repeat(plan.num_clients, 1) for plan in plans])
    multipliers = torch.cat([plan.multipliers.repeat(plan.num_clients, 1) for plan in plans])
    weights = torch.full((len(probs),), 1 / len(probs))
    return cohort_discrepancy(layer.singular_values, probs, multipliers, weights)


def _coverage(layer: LayerRound) -> Tensor:
    return expected_coverage(torch.cat([_holders(plan) for plan in layer.groups.values()]))


def _holders(plan: GroupPlan) -> Tensor:
    """Probabilities of independent events, one of which happens if a client of the group holds a term."""
    if plan.dealt is None:
        return plan.inclusion_probs.repeat(plan.num_clients, 1)
    return (plan.num_clients * plan.inclusion_probs).clamp(max=1.0)[None]  # floor(C pi) clients hold it, or one more
