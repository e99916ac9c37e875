"""What it costs groups to reach a value of the metric, and what they have reached for the same cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_spectral.report.ends import spread_of
from lightning_spectral.report.groups import Group
from lightning_spectral.report.measures import Curve, curve, megabytes, megabytes_at, total
from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.names import VIRTUAL_SECONDS
from lightning_spectral.report.runs import LoggedRun

SHARES = (0.1, 0.25, 0.5, 1.0)  # of the megabytes that all runs have sent
COSTS = ("rounds", "megabytes", "virtual seconds")


def target_table(groups: Sequence[Group], metric: str, target: float, minimise: bool) -> LoggedTable:
    """What each group has spent by the first evaluation that reaches a target, mean and deviation over its runs.

    Costs are those of the runs that reached it, so a group of which some did not looks cheaper than it is: the table
    says how many there are.
    """
    found = [[cost_to_reach(run, metric, target, minimise) for run in group.runs] for group in groups]
    known = [
        name
        for index, name in enumerate(COSTS)
        if any(cost is not None and not math.isnan(cost[index]) for costs in found for cost in costs)
    ]
    rows = []
    for group, costs in zip(groups, found, strict=True):
        reached = [cost for cost in costs if cost is not None]
        spent = [spread_of([cost[COSTS.index(name)] for cost in reached]) if reached else "" for name in known]
        rows.append((group.label, f"{len(reached)} of {len(costs)}", *spent))
    return LoggedTable(("group", "runs that reach it", *known), tuple(rows))


def cost_to_reach(run: LoggedRun, metric: str, target: float, minimise: bool) -> tuple[float, ...] | None:
    """The costs of a run by its first evaluation that is as good as a target; ``None`` if it never was.

    Example:
        >>> from pathlib import Path
        >>> rows = tuple({"fl/round": float(i), "fl/bytes_up": 1e6, "acc": acc} for i, acc in enumerate((0.3, 0.8)))
        >>> cost_to_reach(LoggedRun("run", Path("run"), {}, rows), "acc", 0.5, minimise=False)
        (2.0, 2.0, nan)
    """
    found = curve(run, metric)
    assert found is not None, "the metric was chosen among those that all runs have"
    good = np.flatnonzero(found.values <= target if minimise else found.values >= target)
    if not len(good):
        return None
    round_idx = float(found.rounds[good[0]])
    spent = (megabytes(run), total(run, VIRTUAL_SECONDS, np.max))
    return (round_idx + 1, *(math.nan if one is None else _at(one, round_idx) for one in spent))


def _at(spent: Curve, round_idx: float) -> float:
    position = int(np.searchsorted(spent.rounds, round_idx, side="right")) - 1
    return float(spent.values[position]) if position >= 0 else 0.0


def equal_cost_table(groups: Sequence[Group], metric: str) -> LoggedTable | None:
    """The last evaluation that each group has had for the same megabytes; ``None`` unless all runs counted them."""
    sent = [found for group in groups for run in group.runs if (found := megabytes(run)) is not None]
    if len(sent) < sum(len(group.runs) for group in groups):
        return None
    shared = min(found.last for found in sent)
    budgets = [share * shared for share in SHARES]
    rows = []
    for group in groups:
        reached = [[at_megabytes(run, metric, budget) for run in group.runs] for budget in budgets]
        rows.append((group.label, *map(spread_of, reached)))
    return LoggedTable(("group", *(f"{budget:.3g} MB" for budget in budgets)), tuple(rows))


def at_megabytes(run: LoggedRun, metric: str, budget: float) -> float:
    """The last evaluation before a run had sent more than some megabytes; NaN if there is none."""
    found = curve(run, metric)
    assert found is not None, "the metric was chosen among those that all runs have"
    sent = megabytes_at(run, found.rounds)
    if sent is None:
        return math.nan
    within = found.values[sent <= budget * (1 + 1e-9)]  # the budget is a sum of many rounds, which is rounded
    return float(within[-1]) if len(within) else math.nan
