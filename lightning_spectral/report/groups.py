"""Groups of runs of one experiment, which differ only in their seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_spectral.errors import ReportError
from lightning_spectral.report.measures import Curve, Numbers
from lightning_spectral.report.runs import LoggedRun
from lightning_spectral.report.settings import ABSENT, differing, flat_settings, is_baseline, label, of_a_sweep
from lightning_spectral.report.style import Look, baseline_look, look


@dataclass(frozen=True)
class Group:
    """Runs that are repetitions of each other."""

    label: str  # the settings in which they differ from all others
    runs: tuple[LoggedRun, ...]
    index: int  # among the groups; it decides colour and marker
    is_baseline: bool = False  # whether it is FedAvg, which others are compared with

    @property
    def look(self) -> Look:
        """Colour, marker and line width in all figures."""
        return baseline_look(self.index) if self.is_baseline else look(self.index)

    def at(self, index: int) -> Group:
        """The same group at another position."""
        return replace(self, index=index)

    def each(self, of: Callable[[LoggedRun], Curve | None]) -> list[Curve]:
        """A curve of each run that has it."""
        return [found for run in self.runs if (found := of(run)) is not None]


@dataclass(frozen=True)
class Band:
    """A metric over the rounds that all repetitions have."""

    rounds: Numbers
    mean: Numbers
    std: Numbers  # of a sample; 0 for a single repetition


def group_runs(runs: Sequence[LoggedRun], by: Sequence[str] = ()) -> tuple[list[Group], list[str]]:
    """Group runs by the settings in which they differ, apart from seeds.

    ``by`` names the settings to group by instead, or the last parts of their names. Runs of a sweep are grouped by what
    the sweep varied. A run without settings is a group of its own, since it is not known what it repeats. Runs with the
    same label are one group, whatever their settings are.

    Returns:
        The groups in order of their first runs, and the names of the settings by which they differ.
    """
    settings = [flat_settings(run.config) for run in runs]
    to_tell = [own for run, own in zip(runs, settings, strict=True) if own and not run.label]
    names = _named(settings, by) if by else differing(of_a_sweep(to_tell) or to_tell)
    members: dict[tuple[str, ...], list[LoggedRun]] = {}
    labels: dict[tuple[str, ...], str] = {}
    for run, own in zip(runs, settings, strict=True):
        key = tuple(own.get(name, ABSENT) for name in names) if own else (str(run.path),)
        key = ("label", run.label) if run.label else ("", *key)
        members.setdefault(key, []).append(run)
        labels[key] = run.label or (label(own, names) if own else "") or run.name
    if len(members) == 1 and not runs[0].label:
        labels = {key: runs[0].name if len(runs) == 1 else f"all {len(runs)} runs" for key in labels}
    distinct = numbered([labels[key] for key in members])
    return [
        Group(distinct[index], tuple(found), index, all(is_baseline(flat_settings(run.config)) for run in found))
        for index, found in enumerate(members.values())
    ], names


def numbered(labels: Sequence[str]) -> list[str]:
    """Labels that differ: repeated ones are numbered.

    Example:
        >>> numbered(["run", "FedAvg", "run"])
        ['run', 'FedAvg', 'run (2)']
    """
    seen: Counter[str] = Counter()
    found = []
    for one in labels:
        seen[one] += 1
        found.append(one if seen[one] == 1 else f"{one} ({seen[one]})")
    return found


def _named(settings: Sequence[dict[str, str]], by: Sequence[str]) -> list[str]:
    known = sorted({name for one in settings for name in one})
    found: list[str] = []
    for wanted in by:
        names = [name for name in known if name == wanted or name.endswith(f"/{wanted}")]
        if not names:
            raise ReportError(f"No run has a setting `{wanted}`; known settings: {', '.join(known) or 'none'}.")
        found += names
    return found


def band(curves: Sequence[Curve]) -> Band | None:
    """Mean and spread of repetitions; ``None`` if they share no round.

    Example:
        >>> rounds = np.arange(2.0)
        >>> band([Curve(rounds, np.array([1.0, 2.0])), Curve(rounds[:1], np.array([3.0]))])
        Band(rounds=array([0.]), mean=array([2.]), std=array([1.41421356]))
    """
    shared = sorted(set.intersection(*(set(one.rounds) for one in curves))) if curves else []
    if not shared:
        return None
    values = np.array([one.values[np.searchsorted(one.rounds, shared)] for one in curves])
    std = values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(shared))
    return Band(np.array(shared), values.mean(axis=0), std)


def equal_groups(groups: Sequence[Group], of: Callable[[LoggedRun], Curve | None]) -> list[list[Group]]:
    """Sets of groups whose runs have the same curves to the last digit, at least two rounds long."""
    alike: dict[tuple[tuple[bytes, bytes], ...], list[Group]] = {}
    for group in groups:
        curves = group.each(of)
        if any(len(one.rounds) > 1 for one in curves):
            key = tuple(sorted((one.rounds.tobytes(), one.values.tobytes()) for one in curves))
            alike.setdefault(key, []).append(group)
    return [found for found in alike.values() if len(found) > 1]


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
