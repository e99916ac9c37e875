"""Where groups of runs end: their last evaluation, over the rounds that all repetitions have, and what it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lightning_spectral.report.groups import Group
from lightning_spectral.report.measures import Numbers, curve, run_end
from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.runs import LoggedRun


class End(NamedTuple):
    """The last evaluation that all repetitions of a group have."""

    round_idx: float  # from 0; NaN if they share none, and each is taken at its own last one
    points: Numbers  # megabytes sent by then, and the metric, shape ``(runs, 2)``


def group_end(group: Group, metric: str) -> End:
    """The end of a group; repetitions that got further are cut where the shortest ends."""
    at = last_common_round(group.runs, metric)
    return End(at, np.array([run_end(run, metric, at) for run in group.runs]))


def last_common_round(runs: Sequence[LoggedRun], metric: str) -> float:
    """The last round, from 0, in which all runs were evaluated; NaN if there is none."""
    rounds = [set(found.rounds) for run in runs if (found := curve(run, metric)) is not None]
    return max(set.intersection(*rounds), default=math.nan)


def in_order(groups: Sequence[Group], metric: str) -> list[Group]:
    """FedAvg first, as what others are compared with, then by what was sent; the order decides colours and marks."""

    def key(group: Group) -> tuple[bool, float]:
        cost = float(group_end(group, metric).points[:, 0].mean())
        return not group.is_baseline, math.inf if math.isnan(cost) else cost

    return [group.at(index) for index, group in enumerate(sorted(groups, key=key))]


def groups_table(groups: Sequence[Group], metric: str) -> LoggedTable:
    """A row for each group: its runs, its last evaluation over them, rounds and megabytes."""
    common = last_common_round([run for group in groups for run in group.runs], metric)
    ends = [group_end(group, metric) for group in groups]
    compared = len({end.round_idx for end in ends}) > 1 and not math.isnan(common)
    columns = ("group", "runs", metric, "rounds", "megabytes", *([f"at round {common + 1:g}"] if compared else []))
    rows = []
    for group, end in zip(groups, ends, strict=True):
        rounds = "" if math.isnan(end.round_idx) else int(end.round_idx) + 1
        row = (group.label, len(group.runs), spread_of(end.points[:, 1]), rounds, spread_of(end.points[:, 0]))
        at_common = [run_end(run, metric, common)[1] for run in group.runs] if compared else []
        rows.append((*row, *([spread_of(at_common)] if compared else [])))
    return LoggedTable(columns, tuple(rows))


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
