"""What readers should know of curves before they compare them: which are equal, flat, not finite or shorter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from lightning_spectral.report.ends import last_common_round
from lightning_spectral.report.groups import Group, band, equal_groups
from lightning_spectral.report.measures import Curve, curve, lower_is_better
from lightning_spectral.report.names import DIVERGED, EQUAL_CURVES, FLAT_BASELINE, FLAT_CURVES

FLAT = 0.02  # a metric that stays within this share of its scale has not moved
FEWEST = 3  # evaluations of a curve that may be called flat


def on_curves(groups: Sequence[Group], metric: str) -> str:
    """Which curves lie on each other, do not rise or end in no number, each with the likely reason; empty if none."""
    return " ".join(filter(None, (_equal(groups, metric), _flat(groups, metric), _not_finite(groups, metric))))


def _equal(groups: Sequence[Group], metric: str) -> str:
    found = equal_groups(groups, _of(metric))
    listed = "; ".join(" = ".join(group.label for group in alike) for alike in found)
    return f"Curves that are equal to the last digit: {listed}. {EQUAL_CURVES}" if listed else ""


def _flat(groups: Sequence[Group], metric: str) -> str:
    ranges = [(group, _range_if_flat(group, metric)) for group in groups]
    flat = [(group, *ends) for group, ends in ranges if ends is not None]
    if not flat:
        return ""
    listed = "; ".join(f"{group.label} ({low:.3g} to {high:.3g})" for group, low, high in flat)
    baseline = f" {FLAT_BASELINE}" if any(group.is_baseline for group, *_ in flat) else ""
    return f"Curves that hardly move: {listed}. {FLAT_CURVES}{baseline}"


def _range_if_flat(group: Group, metric: str) -> tuple[float, float] | None:
    """The lowest and highest value of a group's mean; ``None`` if it moves, or has too few to tell."""
    found = band(group.each(_of(metric)))
    if found is None or len(found.mean) < FEWEST or not np.isfinite(found.mean).all():
        return None
    low, high = float(found.mean.min()), float(found.mean.max())
    largest = max(abs(low), abs(high))
    scale = largest if lower_is_better(metric) or largest > 1 else 1.0  # an accuracy of 0.1 is on a scale up to 1
    return (low, high) if high - low < FLAT * scale else None


def _not_finite(groups: Sequence[Group], metric: str) -> str:
    lost = [group.label for group in groups if any(not np.isfinite(one.last) for one in group.each(_of(metric)))]
    return f"Curves that end in no finite number: {'; '.join(lost)}. {DIVERGED}" if lost else ""


def on_lengths(groups: Sequence[Group], metric: str) -> str:
    """Which runs have fewer rounds than others, and what is compared therefore; empty if all are as long."""
    ends = [(group.label, [float(one.rounds[-1]) + 1 for one in group.each(_of(metric))]) for group in groups]
    every = [end for _, of_group in ends for end in of_group]
    if len(set(every)) == 1:
        return ""
    parts = [f"Runs were last evaluated after {min(every):g} to {max(every):g} rounds: some may be unfinished."]
    if within := [label for label, of_group in ends if len(set(of_group)) > 1]:
        parts.append(f"Repetitions are compared where the shortest of them ends: {'; '.join(within)}.")
    common = last_common_round([run for group in groups for run in group.runs], metric) + 1
    if not math.isnan(common):
        parts.append(f"The table also compares all groups at round {common:g}, the last that all runs have.")
    return " ".join(parts)


def _of(metric: str) -> partial[Curve | None]:
    return partial(curve, metric=metric)
