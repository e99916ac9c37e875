"""Checks of arguments, and warnings about modules, optimizers and weights that do not suit spectral sharding."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import nn
from torch.optim import ASGD, SGD, Optimizer

from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.designs import Design
from lightning_spectral.errors import SpectralWarning, check_is
from lightning_spectral.nn.plan.choices import LayerChoices
from lightning_spectral.nn.plan.module_plan import ModulePlan
from lightning_spectral.protocol.schedule import values_of
from lightning_spectral.sharding import ShardingStrategy, TopN

LARGEST_ERROR = 0.5  # share of the squared norm, mean over layers
ROUNDING = torch.finfo(torch.float32).eps  # a term up to this share of the largest one is zero


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
