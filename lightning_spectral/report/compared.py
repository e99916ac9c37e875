"""How groups of runs compare: where they end, what that took, and what readers should know of their curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from lightning_spectral.report.groups import Group
from lightning_spectral.report.measures import (
    Curve,
    Numbers,
    band,
    curve,
    evaluations,
    lower_is_better,
    megabytes,
    megabytes_at,
    total,
)
from lightning_spectral.report.runs import LoggedRun, Table

SHARES = (0.1, 0.25, 0.5, 1.0)  # of the megabytes that all runs have sent
COSTS = ("rounds", "megabytes", "virtual seconds")
FLAT = 0.02  # a metric that stays within this share of its scale has not moved
FEWEST = 3  # evaluations of a curve that may be called flat
EQUAL_CURVES = (
    "While `fl/inclusion_entropy` is 0, every client holds the largest terms and strategies do not differ; after a "
    "spectral start, that is the rule. Compare strategies with `spectral_start=None`."
)
FLAT_CURVES = (
    "If that is chance, nothing has been learned yet: train longer, with a larger learning rate, or with a spectral "
    "start; `fl/loss`, of clients, says whether they learn at all. Pretrained networks may begin where they end."
)
FLAT_BASELINE = " FedAvg is among them, so sharding is not the reason."
DIVERGED = "Training diverged: lower the clients' learning rate, or bound their updates."


class End(NamedTuple):
    """The last evaluation that all repetitions of a group have."""

    round_idx: float  # from 0; NaN if they share none, and each is taken at its own last one
    points: Numbers  # megabytes sent by then, NaN if they were not counted, and the metric, shape ``(runs, 2)``


def group_end(group: Group, metric: str) -> End:
    """The end of a group; repetitions that got further are cut where the shortest ends."""
    at = _last_common_round(group.runs, metric)
    return End(at, np.array([run_end(run, metric, at) for run in group.runs]))


def run_end(run: LoggedRun, metric: str, round_idx: float = math.nan) -> tuple[float, float]:
    """Megabytes sent by the evaluation of a round, the last one if it is NaN, and its result."""
    found = evaluations(run, metric)
    at = -1 if math.isnan(round_idx) else int(np.searchsorted(found.rounds, round_idx))
    return float(megabytes_at(run, found.rounds[[at]])[0]), float(found.values[at])


def _last_common_round(runs: Sequence[LoggedRun], metric: str) -> float:
    """The last round, from 0, in which all runs were evaluated; NaN if there is none."""
    return max(set.intersection(*(set(evaluations(run, metric).rounds) for run in runs)), default=math.nan)


def in_order(groups: Sequence[Group], metric: str) -> list[Group]:
    """FedAvg first, as what others are compared with, then by what was sent; the order decides colours and marks."""

    def key(group: Group) -> tuple[bool, float]:
        cost = float(group_end(group, metric).points[:, 0].mean())
        return not group.is_baseline, math.inf if math.isnan(cost) else cost

    return [replace(group, index=index) for index, group in enumerate(sorted(groups, key=key))]


def groups_table(groups: Sequence[Group], metric: str) -> Table:
    """A row for each group: its runs, its last evaluation over them, rounds and megabytes."""
    common = _last_common_round([run for group in groups for run in group.runs], metric)
    ends = [group_end(group, metric) for group in groups]
    compared = len({end.round_idx for end in ends}) > 1 and not math.isnan(common)
    columns = ("group", "runs", metric, "rounds", "megabytes", *([f"at round {common + 1:g}"] if compared else []))
    rows = []
    for group, end in zip(groups, ends, strict=True):
        rounds = "" if math.isnan(end.round_idx) else int(end.round_idx) + 1
        row = (group.label, len(group.runs), spread_of(end.points[:, 1]), rounds, spread_of(end.points[:, 0]))
        at_common = [run_end(run, metric, common)[1] for run in group.runs] if compared else []
        rows.append((*row, *([spread_of(at_common)] if compared else [])))
    return Table(columns, tuple(rows))


def spread_of(values: Sequence[float] | Numbers) -> str:
    """Mean and standard deviation of repetitions, as text; empty if nothing is known.

    Example:
        >>> spread_of([0.5, 0.7]), spread_of([3.0, 3.0]), spread_of([0.12345]), spread_of([math.nan])
        ('0.6 ± 0.14', '3', '0.1235', '')
    """
    found = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        mean, deviation = float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0
    if math.isnan(mean):
        return "nan" if np.isfinite(found).any() else ""
    return f"{mean:.4g} ± {deviation:.2g}" if deviation else f"{mean:.4g}"


def target_table(groups: Sequence[Group], metric: str, target: float, minimise: bool) -> Table:
    """What each group has spent by the first evaluation that reaches a target, mean and deviation over its runs.

    Costs are those of the runs that reached it, so a group of which some did not looks cheaper than it is: the table
    says how many there are.
    """
    found = [[cost_to_reach(run, metric, target, minimise) for run in group.runs] for group in groups]
    every = [cost for costs in found for cost in costs if cost is not None]
    known = [index for index in range(len(COSTS)) if not all(math.isnan(cost[index]) for cost in every)]
    rows = []
    for group, costs in zip(groups, found, strict=True):
        reached = [cost for cost in costs if cost is not None]
        spent = [spread_of([cost[index] for cost in reached]) if reached else "" for index in known]
        rows.append((group.label, f"{len(reached)} of {len(costs)}", *spent))
    return Table(("group", "runs that reach it", *(COSTS[index] for index in known)), tuple(rows))


def cost_to_reach(run: LoggedRun, metric: str, target: float, minimise: bool) -> tuple[float, ...] | None:
    """The costs of a run by its first evaluation that is as good as a target; ``None`` if it never was."""
    found = evaluations(run, metric)
    good = np.flatnonzero(found.values <= target if minimise else found.values >= target)
    if not len(good):
        return None
    round_idx = float(found.rounds[good[0]])
    spent = (megabytes(run), total(run, "fl/virtual_seconds", max))
    return (round_idx + 1, *(math.nan if one is None else _at(one, round_idx) for one in spent))


def _at(spent: Curve, round_idx: float) -> float:
    position = int(np.searchsorted(spent.rounds, round_idx, side="right")) - 1
    return float(spent.values[position]) if position >= 0 else 0.0


def equal_cost_table(groups: Sequence[Group], metric: str) -> Table | None:
    """The last evaluation that each group has had for the same megabytes; ``None`` unless all runs counted them."""
    sent = [megabytes(run) for group in groups for run in group.runs]
    if None in sent:
        return None
    shared = min(found.last for found in sent if found is not None)
    budgets = [share * shared for share in SHARES]
    rows = []
    for group in groups:
        reached = [[at_megabytes(run, metric, budget) for run in group.runs] for budget in budgets]
        rows.append((group.label, *map(spread_of, reached)))
    return Table(("group", *(f"{budget:.3g} MB" for budget in budgets)), tuple(rows))


def at_megabytes(run: LoggedRun, metric: str, budget: float) -> float:
    """The last evaluation before a run had sent more than some megabytes; NaN if there is none."""
    found = evaluations(run, metric)
    sent = megabytes_at(run, found.rounds)
    within = found.values[sent <= budget * (1 + 1e-9)]  # the budget is a sum of many rounds, which is rounded
    return float(within[-1]) if len(within) else math.nan


def on_curves(groups: Sequence[Group], metric: str) -> str:
    """Which curves lie on each other, do not rise or end in no number, each with the likely reason; empty if none."""
    of = partial(curve, metric=metric)
    parts = []
    if alike := equal_groups(groups, of):
        listed = "; ".join(" = ".join(group.label for group in equal) for equal in alike)
        parts.append(f"Curves that are equal to the last digit: {listed}. {EQUAL_CURVES}")
    flat = [(group, ends) for group in groups if (ends := _range_if_flat(group, metric)) is not None]
    if flat:
        listed = "; ".join(f"{group.label} ({low:.3g} to {high:.3g})" for group, (low, high) in flat)
        baseline = FLAT_BASELINE if any(group.is_baseline for group, _ in flat) else ""
        parts.append(f"Curves that hardly move: {listed}. {FLAT_CURVES}{baseline}")
    lost = [group.label for group in groups if any(not np.isfinite(one.last) for one in group.each(of))]
    if lost:
        parts.append(f"Curves that end in no finite number: {'; '.join(lost)}. {DIVERGED}")
    return " ".join(parts)


def equal_groups(groups: Sequence[Group], of: Callable[[LoggedRun], Curve | None]) -> list[list[Group]]:
    """Sets of groups whose runs have the same curves to the last digit, at least two rounds long."""
    alike: dict[tuple[tuple[bytes, bytes], ...], list[Group]] = {}
    for group in groups:
        curves = group.each(of)
        if any(len(one.rounds) > 1 for one in curves):
            key = tuple(sorted((one.rounds.tobytes(), one.values.tobytes()) for one in curves))
            alike.setdefault(key, []).append(group)
    return [found for found in alike.values() if len(found) > 1]


def _range_if_flat(group: Group, metric: str) -> tuple[float, float] | None:
    """The lowest and highest value of a group's mean; ``None`` if it moves, or has too few to tell."""
    found = band(group.each(partial(curve, metric=metric)))
    if found is None or len(found.mean) < FEWEST or not np.isfinite(found.mean).all():
        return None
    low, high = float(found.mean.min()), float(found.mean.max())
    largest = max(abs(low), abs(high))
    scale = largest if lower_is_better(metric) or largest > 1 else 1.0  # an accuracy of 0.1 is on a scale up to 1
    return (low, high) if high - low < FLAT * scale else None


def on_lengths(groups: Sequence[Group], metric: str) -> str:
    """Which runs have fewer rounds than others, and what is compared therefore; empty if all are as long."""
    ends = {group.label: {float(evaluations(run, metric).rounds[-1]) + 1 for run in group.runs} for group in groups}
    every = set.union(*ends.values())
    if len(every) == 1:
        return ""
    parts = [f"Runs were last evaluated after {min(every):g} to {max(every):g} rounds: some may be unfinished."]
    if within := [label for label, of_group in ends.items() if len(of_group) > 1]:
        parts.append(f"Repetitions are compared where the shortest of them ends: {'; '.join(within)}.")
    common = _last_common_round([run for group in groups for run in group.runs], metric) + 1
    if not math.isnan(common):
        parts.append(f"The table also compares all groups at round {common:g}, the last that all runs have.")
    return " ".join(parts)


def pareto_front(costs: Sequence[float], values: Sequence[float], lower_is_better: bool) -> list[int]:
    """Indices of the points that no other point beats in both respects, by ascending cost; NaN is never among them.

    Example:
        >>> pareto_front([3, 1, 2, 4], [0.9, 0.5, 0.4, 0.95], lower_is_better=False)
        [1, 0, 3]
    """
    sign = 1 if lower_is_better else -1
    front: list[int] = []
    known = [index for index in range(len(costs)) if not math.isnan(costs[index] + values[index])]
    for index in sorted(known, key=lambda i: (costs[i], sign * values[i])):
        if not front or sign * values[index] < sign * values[front[-1]]:
            front.append(index)
    return front
