"""Groups of runs of one experiment, which differ only in their seeds, and the settings by which groups differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_spectral.errors import ReportError
from lightning_spectral.report.measures import Curve
from lightning_spectral.report.runs import LoggedRun
from lightning_spectral.report.style import Look, baseline_look, look
from lightning_spectral.report.texts import printable, shortened

Settings: TypeAlias = Mapping[str, str]
ABSENT = "—"
# Settings in which repetitions of one experiment differ, by the last part of their names.
REPETITION = frozenset({"seed", "seed_everything", "random_state", "fingerprint", "partition"})
STRATEGY = "strategy"  # the argument that says more than the class that has it
SWEEP = "sweep/"  # before the names of settings that a sweep varied
LONGEST = 40  # letters of a value in a label


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

    def each(self, of: Callable[[LoggedRun], Curve | None]) -> list[Curve]:
        """A curve of each run that has it."""
        return [found for run in self.runs if (found := of(run)) is not None]


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
    varied = [{name: value for name, value in own.items() if name.startswith(SWEEP)} for own in to_tell]
    names = _named(settings, by) if by else differing(varied if all(varied) else to_tell)
    members: dict[tuple[str, ...], list[LoggedRun]] = {}
    labels: dict[tuple[str, ...], str] = {}
    for run, own in zip(runs, settings, strict=True):
        key = tuple(own.get(name, ABSENT) for name in names) if own else (str(run.path),)
        key = ("label", run.label) if run.label else ("", *key)
        members.setdefault(key, []).append(run)
        labels[key] = run.label or (label(own, names) if own else "") or run.name
    if len(members) == 1 and not runs[0].label:
        labels = {key: runs[0].name if len(runs) == 1 else f"all {len(runs)} runs" for key in labels}
    distinct = _numbered([labels[key] for key in members])
    return [
        Group(distinct[index], tuple(found), index, all(is_baseline(flat_settings(run.config)) for run in found))
        for index, found in enumerate(members.values())
    ], names


def _numbered(labels: Sequence[str]) -> list[str]:
    """Labels that differ: repeated ones are numbered."""
    seen: Counter[str] = Counter()
    found = []
    for one in labels:
        seen[one] += 1
        found.append(one if seen[one] == 1 else f"{one} ({seen[one]})")
    return found


def _named(settings: Sequence[Settings], by: Sequence[str]) -> list[str]:
    known = sorted({name for one in settings for name in one})
    found: list[str] = []
    for wanted in by:
        names = [name for name in known if name == wanted or name.endswith(f"/{wanted}")]
        if not names:
            raise ReportError(f"No run has a setting `{wanted}`; known settings: {', '.join(known) or 'none'}.")
        found += names
    return found


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """All settings as ``outer/inner``, each with its value as text; a choice is its class, with its arguments inside.

    Example:
        >>> flat_settings({"seed": 1, "algorithm": {"name": "Sharding", "keep_ratio": 0.2}})
        {'seed': '1', 'algorithm': 'Sharding', 'algorithm/keep_ratio': '0.2'}
    """
    return {printable(name): printable(value) for name, value in _flat("", config)}


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if not isinstance(value, Mapping):
        yield name, str(value)
        return
    is_choice = bool(name) and isinstance(value.get("name"), str)
    if is_choice:
        yield name, value["name"]
    for key, inner in value.items():
        if not (is_choice and key == "name"):
            yield from _flat(f"{name}/{key}".lstrip("/"), inner)


def differing(all_settings: Sequence[Settings]) -> list[str]:
    """The settings in which experiments differ, in order, apart from those of repetitions such as seeds.

    Arguments are compared only among runs with the same class around them: what a class has, and another has not or has
    with another value, is not a difference of its own.

    Example:
        >>> a = {"algorithm": "FedAvg", "seed": "0"}
        >>> b = {"algorithm": "Sharding", "algorithm/keep_ratio": "0.2", "seed": "1"}
        >>> differing([a, b]), differing([a, b, {**b, "algorithm/keep_ratio": "0.1"}])
        (['algorithm'], ['algorithm', 'algorithm/keep_ratio'])
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


def is_baseline(settings: Settings) -> bool:
    """Whether all models of a run are trained by FedAvg.

    Example:
        >>> is_baseline({"federation/algorithm": "FedAvg"}), is_baseline({"federation/algorithm": "LoRA"})
        (True, False)
        >>> is_baseline({"federation/a/algorithm": "FedAvg", "federation/b/algorithm": "LoRA"}), is_baseline({})
        (False, False)
    """
    own = {name: value for name, value in settings.items() if not name.startswith(SWEEP)}
    return {value for name, value in own.items() if name.split("/")[-1] == "algorithm"} == {"FedAvg"}


def label(settings: Settings, names: Sequence[str]) -> str:
    """A label that distinguishes a run: its values of some settings. A class is left out if its strategy is shown.

    Example:
        >>> label({"a": "Sharding", "a/strategy": "TopN", "a/keep_ratio": "0.2"}, ["a", "a/strategy", "a/keep_ratio"])
        'TopN, keep_ratio=0.2'
        >>> label({"a": "FedAvg"}, ["a", "a/strategy", "a/keep_ratio"])
        'FedAvg'
    """
    shown = [name for name in names if name in settings]
    parts = [_part(name, settings[name], shown) for name in shown if f"{name}/{STRATEGY}" not in shown]
    return ", ".join(sorted(parts, key=lambda part: "=" in part))


def _part(name: str, value: str, shown: Sequence[str]) -> str:
    around, _, own = name.rpartition("/")
    is_class = value.isidentifier() and value[0].isupper() and value not in ("True", "False", "None")
    return value if is_class and (own == STRATEGY or around not in shown) else f"{own}={shortened(value, LONGEST)}"
