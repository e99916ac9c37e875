"""Groups of runs that differ only in their seeds, and how groups compare: where they end, what that took, remarks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from lightning_spectral.errors import ReportError
from lightning_spectral.report import measures
from lightning_spectral.report.measures import Curve, Numbers
from lightning_spectral.report.runs import LoggedRun, Table, printable, shortened

Settings: TypeAlias = Mapping[str, str]
ABSENT = "—"
# Settings in which repetitions of one experiment differ, by the last part of their names.
REPETITION = frozenset({"seed", "seed_everything", "random_state", "fingerprint", "partition"})
STRATEGY = "strategy"  # the argument that says more than the class that has it
SWEEP = "sweep/"  # before the names of settings that a sweep varied
LONGEST = 40  # letters of a value in a label
SHARES = (0.1, 0.25, 0.5, 1.0)  # of the megabytes that all runs have sent
COSTS = ("rounds", "megabytes", "virtual seconds")
FLAT = 0.02  # a metric that stays within this share of its scale has not moved
STRETCHED = 10  # how much longer an axis may be than nine in ten of its values need
FEWEST = 3  # evaluations of a curve that may be called flat
LAST = 5  # evaluations whose mean is the result of a run: groups that are ranked by a single one are ranked by chance
EQUAL_CURVES = (
    "While `fl/inclusion_entropy` is 0, every client holds the largest terms and strategies do not differ; after a "
    "spectral start, that is the rule. Compare strategies with `spectral_start=None`."
)
FLAT_CURVES = (
    "If that is chance, nothing has been learned yet: train longer, with a larger learning rate, or with a spectral "
    "start; `fl/loss`, of clients, says whether they learn at all. A pretrained network may have little left to learn."
)
FLAT_BASELINE = " FedAvg is among them, so sharding is not the reason."
DIVERGED = "Training diverged: lower the clients' learning rate, or bound their updates."


@dataclass(frozen=True)
class Group:
    """Runs that are repetitions of each other."""

    label: str  # the settings in which they differ from all others
    runs: tuple[LoggedRun, ...]
    index: int  # among the groups; it decides colour and marker
    is_baseline: bool = False  # whether it is FedAvg, which others are compared with

    def each(self, of: Callable[[LoggedRun], Curve | None]) -> list[Curve]:
        """A curve of each run that has it."""
        return [found for run in self.runs if (found := of(run)) is not None]


def group_runs(runs: Sequence[LoggedRun], by: Sequence[str] = ()) -> tuple[list[Group], list[str]]:
    """Group runs by the settings in which they differ, apart from seeds; return the names of these settings too.

    ``by`` names the settings to group by instead, or the last parts of their names. Runs of a sweep are grouped by what
    the sweep varied. A run without settings is a group of its own, since it is not known what it repeats. Runs with the
    same label are one group, whatever their settings are. The groups are in the order of their first runs.
    """
    settings = [flat_settings(run.config) for run in runs]
    known, names = sorted({name for one in settings for name in one}), list[str]()
    for wanted in by:
        names += (meant := [name for name in known if f"/{name}".endswith(f"/{wanted}")])
        if not meant:
            raise ReportError(f"No run has a setting `{wanted}`; known settings: {', '.join(known) or 'none'}.")
    if not by:
        compared = [own for run, own in zip(runs, settings, strict=True) if own and not run.label]
        varied = [{name: value for name, value in own.items() if name.startswith(SWEEP)} for own in compared]
        names = differing(varied if all(varied) else compared)
    members: dict[tuple[str, ...], list[tuple[LoggedRun, Settings]]] = defaultdict(list)
    for run, own in zip(runs, settings, strict=True):
        key = tuple(own.get(name, ABSENT) for name in names) if own else (str(run.path),)
        members[("label", run.label) if run.label else ("", *key)].append((run, own))
    groups, seen = [], Counter[str]()
    for index, found in enumerate(members.values()):
        alike, chosen = zip(*found, strict=True)
        run = alike[-1]
        text = run.label or (label(chosen[-1], names) if chosen[-1] else "") or run.name
        if len(members) == 1 and not run.label:
            text = run.name if len(runs) == 1 else f"all {len(runs)} runs"
        seen[text] += 1
        distinct = text if seen[text] == 1 else f"{text} ({seen[text]})"
        fixed = [{name: value for name, value in own.items() if not name.startswith(SWEEP)} for own in chosen]
        used = ({value for name, value in own.items() if f"/{name}".endswith("/algorithm")} for own in fixed)
        groups.append(Group(distinct, alike, index, all(algorithms == {"FedAvg"} for algorithms in used)))
    return groups, names


def flat_settings(config: Mapping[str, Any], around: str = "") -> dict[str, str]:
    """All settings as ``outer/inner``, with their values as text; a choice is its class, with its arguments inside."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name, inner = printable(f"{around}/{key}".lstrip("/")), dict(value) if isinstance(value, Mapping) else None
        if inner is None or isinstance(inner.get("name"), str):
            found[name] = printable(str(value if inner is None else inner.pop("name")))
        found |= flat_settings(inner or {}, name)
    return found


def differing(all_settings: Sequence[Settings]) -> list[str]:
    """The settings in which experiments differ, in order, apart from those of repetitions such as seeds.

    Arguments are compared only among runs with the same class around them: what a class has, and another has not or has
    with another value, is not a difference of its own.
    """
    found: list[str] = []
    names = {name for settings in all_settings for name in settings}
    for name in sorted(names, key=lambda name: name.split("/")):  # each outer one before those inside it
        around = [outer for outer in found if name.startswith(f"{outer}/")]
        options: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for settings in all_settings:
            options[tuple(settings.get(outer, ABSENT) for outer in around)].add(settings.get(name, ABSENT))
        if any(len(alike) > 1 for alike in options.values()) and not REPETITION & set(name.split("/")):
            found.append(name)
    return found


def label(settings: Settings, names: Sequence[str]) -> str:
    """A label that distinguishes a run: its values of some settings. A class is left out if its strategy is shown."""
    shown = [name for name in names if name in settings]
    parts = []
    for name in shown:
        (around, _, own), value = name.rpartition("/"), settings[name]
        is_class = value.isidentifier() and value[0].isupper() and value not in ("True", "False", "None")
        if f"{name}/{STRATEGY}" not in shown:
            stands_alone = is_class and (own == STRATEGY or around not in shown)
            parts.append(value if stands_alone else f"{own}={shortened(value, LONGEST)}")
    return ", ".join(sorted(parts, key=lambda part: "=" in part))


def run_end(run: LoggedRun, metric: str, round_idx: float = math.inf) -> tuple[float, float]:
    """Megabytes sent by the last evaluation until a round, and the mean of `LAST` until then."""
    found = until(measures.evaluations(run, metric), round_idx)
    return float(measures.megabytes_at(run, found.rounds[-1:])[0]), float(found.values[-LAST:].mean())


def until(found: Curve, round_idx: float) -> Curve:
    """A curve up to a round, and with it."""
    return Curve(found.rounds[found.rounds <= round_idx], found.values[found.rounds <= round_idx])


def last_common_round(runs: Sequence[LoggedRun], metric: str) -> float:
    """The last round, from 0, in which all runs were evaluated; infinity if there is none."""
    return max(set.intersection(*(set(measures.evaluations(run, metric).rounds) for run in runs)), default=math.inf)


def group_end(group: Group, metric: str) -> Numbers:
    """Megabytes, NaN if not counted, and results by the last evaluation that all have, or its own; ``(runs, 2)``."""
    at = last_common_round(group.runs, metric)
    return np.array([run_end(run, metric, at) for run in group.runs])


def in_order(groups: Sequence[Group], metric: str) -> list[Group]:
    """FedAvg first, as what others are compared with, then by what was sent; the order decides colours and marks."""
    costs = [group_end(group, metric)[:, 0].mean() for group in groups]
    order = np.lexsort((costs, [not group.is_baseline for group in groups]))  # by the last key first; NaN comes last
    return [replace(groups[position], index=index) for index, position in enumerate(order)]


def spread_of(values: Sequence[float] | Numbers) -> str:
    """Mean and standard deviation of repetitions, as text; of those that are known, and of how many these are."""
    every = np.asarray(values, dtype=np.float64)
    found = every[~np.isnan(every)]
    if not len(found):
        return ""
    with np.errstate(all="ignore"):
        mean, deviation = float(found.mean()), float(found.std(ddof=1)) if len(found) > 1 else 0.0
    known = f" ({len(found)} of {len(every)})" if len(found) < len(every) else ""
    return f"{mean:.4g} ± {deviation:.2g}{known}" if deviation else f"{mean:.4g}{known}"


def groups_table(groups: Sequence[Group], metric: str, minimise: bool) -> Table:
    """A row for each group: its runs, means of their last evaluations and the best one, rounds and megabytes."""
    common = last_common_round([run for group in groups for run in group.runs], metric)
    ends = [last_common_round(group.runs, metric) for group in groups]
    compared = len(set(ends)) > 1 and common < math.inf
    rows = []
    for group, end in zip(groups, ends, strict=True):
        sent, reached = group_end(group, metric).T
        rounds, pick = "" if end == math.inf else int(end) + 1, np.min if minimise else np.max
        best = spread_of([float(pick(until(measures.evaluations(run, metric), end).values)) for run in group.runs])
        at_common = [spread_of([run_end(run, metric, common)[1] for run in group.runs])] if compared else []
        rows.append((group.label, len(group.runs), spread_of(reached), best, rounds, spread_of(sent), *at_common))
    names = ("group", "runs", f"{metric}, last {LAST}", "best", "rounds", "megabytes")
    return Table((*names, *([f"at round {common + 1:g}"] if compared else [])), tuple(rows))


def target_table(groups: Sequence[Group], metric: str, target: float, minimise: bool) -> Table:
    """What each group has spent by the first evaluation that reaches a target, mean and deviation over its runs.

    A group looks cheaper than it is if some runs never reached it, so the table says how many did.
    """
    costs = [[cost_to_reach(run, metric, target, minimise) for run in group.runs] for group in groups]
    reached = [[cost for cost in of_group if cost is not None] for of_group in costs]
    every = [cost for of_group in reached for cost in of_group]
    known = [index for index in range(len(COSTS)) if not all(math.isnan(cost[index]) for cost in every)]
    rows = []
    for group, of_group in zip(groups, reached, strict=True):
        spent = (spread_of([cost[index] for cost in of_group]) for index in known)
        rows.append((group.label, f"{len(of_group)} of {len(group.runs)}", *spent))
    return Table(("group", "runs that reach it", *(COSTS[index] for index in known)), tuple(rows))


def cost_to_reach(run: LoggedRun, metric: str, target: float, minimise: bool) -> tuple[float, ...] | None:
    """The costs of a run by its first evaluation that is as good as a target; ``None`` if it never was."""
    found = measures.evaluations(run, metric)
    good = np.flatnonzero(found.values <= target if minimise else found.values >= target)
    if not len(good):
        return None
    round_idx = float(found.rounds[good[0]])
    spent = (measures.megabytes(run), measures.total(run, ("fl/virtual_seconds",), max))
    costs = (math.nan if one is None else float(one.values[one.rounds <= round_idx][-1]) for one in spent)
    return (round_idx + 1, *costs)


def equal_cost_table(groups: Sequence[Group], metric: str) -> Table | None:
    """The last evaluation that each group has had for the same megabytes; ``None`` unless all runs counted them."""
    sent = [measures.megabytes(run) for group in groups for run in group.runs]
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
    found = measures.evaluations(run, metric)
    sent = measures.megabytes_at(run, found.rounds)
    within = found.values[sent <= budget * (1 + 1e-9)]  # the budget is a sum of many rounds, which is rounded
    return float(within[-1]) if len(within) else math.nan


def on_curves(groups: Sequence[Group], metric: str) -> str:
    """Which curves lie on each other, do not rise or end in no number, each with the likely reason; empty if none."""
    of, parts, flat = partial(measures.curve, metric=metric), [], []
    means = [(group, mean.values) for group in groups if (mean := measures.band(group.each(of))) is not None]
    if alike := equal_groups(groups, of):
        listed = "; ".join(" = ".join(group.label for group in equal) for equal in alike)
        parts.append(f"Curves that are equal to the last digit: {listed}. {EQUAL_CURVES}")
    is_loss = measures.lower_is_better(metric)
    for group, values in means:
        if len(values) >= FEWEST and np.isfinite(values).all():
            low, high, largest = values.min(), values.max(), abs(values).max()
            scale = largest if is_loss or largest > 1 else 1.0  # an accuracy is on a scale up to 1
            if high - low < FLAT * scale:
                flat.append((group, f"{group.label} ({low:.3g} to {high:.3g})"))
    if flat:
        baseline = FLAT_BASELINE if any(group.is_baseline for group, _ in flat) else ""
        parts.append(f"Curves that hardly move: {'; '.join(text for _, text in flat)}. {FLAT_CURVES}{baseline}")
    every = np.concatenate([own[np.isfinite(own)] for _, own in means] or [np.empty(0)])
    low, high, first, last = np.quantile(every, (0.05, 0.95, 0, 1)) if len(every) else np.zeros(4)
    if last - first > STRETCHED * max(high - low, 1e-12 * abs(high)):  # most values look the same
        middle, reach = (low + high) / 2, STRETCHED / 4 * (high - low)
        far = [group.label for group, own in means if (np.abs(own - middle) > reach).any()]
        parts.append(
            f"The axis goes from {first:.3g} to {last:.3g} because of {'; '.join(far)}; nine in ten values lie "
            f"between {low:.3g} and {high:.3g}, and look alike."
        )
    if lost := [group.label for group in groups if any(not np.isfinite(one.last) for one in group.each(of))]:
        parts.append(f"Curves that end in no finite number: {'; '.join(lost)}. {DIVERGED}")
    return " ".join(parts)


def equal_groups(groups: Sequence[Group], of: Callable[[LoggedRun], Curve | None]) -> list[list[Group]]:
    """Sets of groups whose runs have the same curves to the last digit, at least two rounds long."""
    alike: dict[tuple[tuple[bytes, bytes], ...], list[Group]] = defaultdict(list)
    for group in groups:
        curves = group.each(of)
        if any(len(one.rounds) > 1 for one in curves):
            alike[tuple(sorted((one.rounds.tobytes(), one.values.tobytes()) for one in curves))].append(group)
    return [found for found in alike.values() if len(found) > 1]


def on_repetitions(groups: Sequence[Group], metric: str) -> str:
    """Which order of groups may be chance: without repetitions, or with intervals that overlap; empty if none."""
    parts, chains, top = [], list[list[str]](), -math.inf
    if len(groups) > 1 and (alone := [group.label for group in groups if len(group.runs) == 1]):
        whose = "every group" if len(alone) == len(groups) else "; ".join(alone)
        parts.append(f"A single run: {whose}. Other seeds may reverse the order; run several: `sweep --seeds 0,1,2`.")
    results = {group.label: group_end(group, metric)[:, 1] for group in groups if len(group.runs) > 1}
    spans = [(own.mean() - own.std(ddof=1), own.mean() + own.std(ddof=1), label) for label, own in results.items()]
    for low, high, label in sorted(span for span in spans if math.isfinite(span[1])):
        if low > top:
            chains.append([])
        chains[-1].append(label)
        top = max(top, high)
    if overlapping := "; ".join(" and ".join(labels) for labels in chains if len(labels) > 1):
        parts.append(f"Their order is not settled, as their standard deviations overlap: {overlapping}.")
    return " ".join(parts)


def on_lengths(groups: Sequence[Group], metric: str) -> str:
    """Which runs have fewer rounds than others, and what is compared therefore; empty if all are as long."""
    ends = {group.label: {measures.evaluations(run, metric).rounds[-1] + 1 for run in group.runs} for group in groups}
    every = set.union(*ends.values())
    if len(every) == 1:
        return ""
    parts = [f"Runs were last evaluated after {min(every):g} to {max(every):g} rounds: some may be unfinished."]
    if within := [label for label, of_group in ends.items() if len(of_group) > 1]:
        parts.append(f"Repetitions are compared where the shortest of them ends: {'; '.join(within)}.")
    common = last_common_round([run for group in groups for run in group.runs], metric) + 1
    if common < math.inf:
        parts.append(f"The table also compares all groups at round {common:g}, the last that all runs have.")
    return " ".join(parts)


def pareto_front(costs: Sequence[float], values: Sequence[float], lower_is_better: bool) -> list[int]:
    """Indices of the points that no other point beats in both respects, by ascending cost; NaN is never among them."""
    sign = 1 if lower_is_better else -1
    front: list[int] = []
    known = [index for index in range(len(costs)) if not math.isnan(costs[index] + values[index])]
    for index in sorted(known, key=lambda i: (costs[i], sign * values[i])):
        if not front or sign * values[index] < sign * values[front[-1]]:
            front.append(index)
    return front
