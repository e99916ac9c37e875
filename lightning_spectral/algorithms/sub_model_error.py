"""How far single sub-models are from the weights, with warnings if they are too far or hold empty terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from lightning_spectral.algorithms.spectral_round import LayerRound

LARGEST_ERROR = 0.5  # share of the squared norm, mean over layers
ROUNDING = torch.finfo(torch.float32).eps  # a term up to this share of the largest one is zero


def noisy_sub_models(layers: Mapping[str, LayerRound], starts_random: bool) -> Sequence[str]:
    """A warning if the sub-models of a keep ratio are far from the weights, for the worst ratio only.

    Args:
        layers: The sharded layers of an open round.
        starts_random: Whether the run has no spectral start, which might then help.

    Returns:
        The warning with its remedies, or nothing.
    """
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
        f"{mean_errors[ratio]:.3g} times the squared norm of the weight, mean over {len(layers)} sharded layers; with "
        f"so many terms it is at least {least:.3g}. The spectra are flat, as those of random weights are."
    )
    return [f"{figures} Use {_remedies(least, starts_random)}; `fl/client_error` of SpectralDiagnostics follows it."]


def _remedies(least: float, starts_random: bool) -> str:
    """What can lower the error; a strategy is named only if some choice of terms is good enough."""
    start = ["`spectral_start=SpectralStart()`"] if starts_random else []
    strategy = ["TopN(), which has the least error"] if least <= LARGEST_ERROR else []
    return " or ".join([*start, "a larger keep ratio", *strategy])


def empty_terms(layers: Mapping[str, LayerRound]) -> Sequence[str]:
    """A warning if even the smallest clients hold more terms of a matrix than its rank.

    Args:
        layers: The sharded layers of an open round.

    Returns:
        The warning with its remedies, or nothing.
    """
    ranks = {name: _rank(layer) for name, layer in layers.items()}
    fewest = {name: min(plan.num_terms for plan in layer.groups.values()) for name, layer in layers.items()}
    lacking = [
        f"{name} (rank {rank} of {len(layers[name].singular_values)}; clients hold at least {fewest[name]} terms)"
        for name, rank in ranks.items()
        if rank < fewest[name]
    ]
    if not lacking:
        return []
    return [
        f"the weights of some sharded layers have fewer terms than every client holds: {', '.join(lacking)}. Their "
        "rank never grows, because a term of size zero has no gradient. Keep them dense with `exclude=`, or initialise "
        "them differently."
    ]


def _rank(layer: LayerRound) -> int:
    """Rank of the weight up to rounding; the rounding of half precision is terms that can train."""
    s = layer.singular_values
    return int((s > min(ROUNDING, torch.finfo(layer.mean.u.dtype).eps) * s[0]).sum())
