"""Diagnostics of rounds: how good a sampling is, and how the update compares with that of whole models."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_spectral.algorithms.fed_avg import FedAvg
from lightning_spectral.algorithms.term_draws import GroupPlan, TermDraws
from lightning_spectral.arguments import Whole
from lightning_spectral.client.forms import Forms
from lightning_spectral.functional.figures import (
    cohort_discrepancy,
    coordinated_discrepancy,
    entropy_rank,
    expected_coverage,
    participation_rank,
    stable_rank,
)
from lightning_spectral.plugin.callbacks.round_callback import RoundCallback
from lightning_spectral.protocol.records import RoundSummary


class SpectralDiagnostics(RoundCallback):
    """Logs, averaged over the sharded layers, how well a round's sub-models represent the weights.

    - ``fl/discrepancy``: expected squared Frobenius error of the cohort's average over the weight's squared norm.
    - ``fl/client_error``: the same error for a single client's sub-model, averaged over the clients.
    - ``fl/expected_coverage``: expected share of terms held by some client (``fl/terms_visited`` is the realised one).
    - ``fl/entropy_rank``, ``fl/participation_rank``, ``fl/stable_rank``: effective ranks, as shares of N.
      Terms that no client could hold, whose values are not computed, count as equal in the first two.

    It also logs the strategy's own `ShardingStrategy.figures`, such as ``fl/effective_cohort`` of `EffectiveCohort`, as
    means over keep ratios: for each layer, as ``fl/effective_cohort/<layer>``, and averaged over the layers. Without
    sharded layers, it logs nothing. `lightning_spectral.functional` has the figures as pure functions.

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

    def on_round_start(self, trainer: pl.Trainer, pl_module: Any, opened: Any) -> None:
        if self.is_due(trainer.current_epoch) and (draws := opened.observed().term_draws):
            by_layer = self.by_layer[pl_module.name] = layer_figures(draws)
            figures = spectral_figures(draws, by_layer)
            values = {name: torch.tensor(value, dtype=torch.float64) for name, value in figures.items()}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)


def layer_figures(draws: Mapping[str, TermDraws]) -> dict[str, dict[str, float]]:
    """The figures of each sharded layer in one round."""
    found = {}
    for name, layer in draws.items():
        s, plans = layer.singular_values, layer.groups
        num_singular, squared_norm = len(s), float((s**2).sum())
        errors = sum(error * plans[ratio].num_clients for ratio, error in layer.client_errors().items())
        found[name] = {
            "discrepancy": float(_discrepancy(s, list(plans.values()))) / squared_norm if squared_norm else 0.0,
            "client_error": errors / sum(plan.num_clients for plan in plans.values()),
            "expected_coverage": float(expected_coverage(torch.cat([_holders(plan) for plan in plans.values()]))),
            "entropy_rank": entropy_rank(s) / num_singular,
            "participation_rank": participation_rank(s) / num_singular,
            "stable_rank": stable_rank(s) / num_singular,
        }
    return found


def spectral_figures(
    draws: Mapping[str, TermDraws], by_layer: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, float]:
    """The figures of one round, by the names under which they are logged."""
    by_layer = layer_figures(draws) if by_layer is None else by_layer
    chosen = {}  # the strategy's own figures on its choices for a layer, averaged over keep ratios
    for name, layer in draws.items():
        figures, s = layer.strategy.figures, layer.singular_values
        chosen[name] = _means(figures(s, plan.num_terms, float(plan.num_clients)) for plan in layer.groups.values())
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


def _discrepancy(s: Tensor, plans: Sequence[GroupPlan]) -> Tensor:
    """Exact for independent clients and for one coordinated group; several such groups count as independent clients."""
    if len(plans) == 1 and plans[0].dealt is not None:
        (plan,) = plans
        return coordinated_discrepancy(s, plan.inclusion_probs, plan.multipliers, plan.num_clients, plan.weights)
    probs = torch.cat([plan.inclusion_probs.repeat(plan.num_clients, 1) for plan in plans])
    multipliers = torch.cat([plan.multipliers.repeat(plan.num_clients, 1) for plan in plans])
    return cohort_discrepancy(s, probs, multipliers, torch.cat([plan.weights for plan in plans]))


def _holders(plan: GroupPlan) -> Tensor:
    """Probabilities of independent events, one of which happens if a client of the group holds a term."""
    if plan.dealt is None:
        return plan.inclusion_probs.repeat(plan.num_clients, 1)
    return (plan.num_clients * plan.inclusion_probs).clamp(max=1.0)[None]  # floor(C pi) clients hold it, or one more


class UpdateAlignment(RoundCallback):
    """Logs ``fl/fedavg_alignment``: the cosine between the server's update and that of a FedAvg round.

    The same clients train the whole model from the same weights on the same batches. Their mean update is compared with
    that of the run's algorithm, then discarded. Each comparison costs one extra dense round, so use it sparingly.

    Args:
        every_n_rounds: Compare in rounds 0, n, 2n, ...

    Reference:
        Korzhenkov & Louizos (2024), appendix A, Figure 4.
    """

    reads_clients = True

    def __init__(self, every_n_rounds: int = 10) -> None:
        self.every_n_rounds: int = Whole(at_least=1)("every_n_rounds", every_n_rounds)
        self._begun: dict[str, tuple[dict[str, Tensor], list[dict[str, Any]]]] = {}  # by the model's name

    def on_round_start(self, trainer: pl.Trainer, pl_module: Any, opened: Any) -> None:
        self._begun.pop(pl_module.name, None)
        if trainer.current_epoch % self.every_n_rounds == 0:
            options = [dict(group) for template in pl_module.templates for group in template.param_groups]
            self._begun[pl_module.name] = copy.deepcopy(pl_module.module.state_dict()), options

    def on_round_end(self, trainer: pl.Trainer, pl_module: Any, summary: RoundSummary) -> None:
        units = [client.unit for client in summary.clients if not client.left_out]
        before, options = self._begun.pop(pl_module.name, ({}, []))
        if not before or not units:
            return
        module = pl_module.module
        changes = [(p.detach() - before[n]).flatten() for n, p in module.named_parameters() if p.requires_grad]
        groups = [group for template in pl_module.templates for group in template.param_groups]
        with ExitStack() as after:
            for group, values in zip(groups, options, strict=True):
                after.callback(group.update, dict(group))
                group.update(values)  # schedules have moved on to the next round
            after.enter_context(Forms(module, lambda module, capacity: None).client(1.0))  # the server, in other memory
            module.load_state_dict(before)
            engine = pl_module.build_engine(module, FedAvg())
            after.callback(engine.abandon_round)
            share = slice(engine.processes.rank, None, engine.processes.size)
            engine.open_round(summary.round_idx, units).play(units[share])
            engine.round.gather()
            engine.apply_round()
            theirs = -torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).double()
        cosine = torch.nn.functional.cosine_similarity(torch.cat(changes).double(), theirs, dim=0)
        pl_module.log("fl/fedavg_alignment", cosine.double(), on_step=False, on_epoch=True, batch_size=1)
