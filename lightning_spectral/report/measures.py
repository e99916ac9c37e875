"""The measures of a run in a report: an evaluation metric, the cost of reaching it, and how clients fared."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_spectral.errors import ReportError
from lightning_spectral.report.names import (
    AFTER_TRAINING,
    BYTES,
    CLIENTS,
    HIGH,
    HIGHER_IS_BETTER,
    LOW,
    LOWER_IS_BETTER,
    MIDDLE,
    OVER_BYTES,
    ROUND,
    SECONDS,
)
from lightning_spectral.report.runs import LoggedRun

MAX_LISTED = 20  # metrics in a message
Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One metric over the communication rounds that have it."""

    rounds: Numbers  # from 0
    values: Numbers

    @property
    def last(self) -> float:
        """The last value."""
        return float(self.values[-1])


def curve(run: LoggedRun, metric: str, of_all: bool = True) -> Curve | None:
    """A metric over rounds, or ``None`` without it; with several models, the mean over all, or over those that have it.

    Example:
        >>> rows = ({"fl/round": 0.0, "a/fl/loss": 1, "a/acc": 0.2, "b/fl/loss": 1, "b/acc": 0.4},)
        >>> curve(LoggedRun("r", Path("r"), {}, rows), "acc").values
        array([0.3])
    """
    columns = [metric] if metric in run.names else [f"{model}/{metric}" for model in models(run)]
    if not of_all:
        columns = [name for name in columns if name in run.names]
    rows = [row for row in run.rows if columns and all(name in row for name in columns)]
    if not rows:
        return None
    values = np.array([[row[name] for name in columns] for row in rows]).mean(axis=1)
    return Curve(np.array([row[ROUND] for row in rows]), values)


def models(run: LoggedRun) -> list[str]:
    """Names of the models of a run that trains several; the names of their metrics begin with them."""
    own = (name for name in run.names if "/fl/" in name and not name.startswith(OVER_BYTES))
    return sorted({name.partition("/fl/")[0] for name in own})


def megabytes(run: LoggedRun) -> Curve | None:
    """Traffic by the end of each round: down, up and for measuring, of all clients and models, in 10^6 bytes."""
    columns = [name for name in run.names if name.endswith(BYTES)]
    if not columns:
        return None
    sums = [sum(row.get(name, 0.0) for name in columns) for row in run.rows]
    return Curve(np.array([row[ROUND] for row in run.rows]), np.cumsum(sums) / 1e6)


def total(run: LoggedRun, name: str, over_models: Callable[[list[float]], float] = math.fsum) -> Curve | None:
    """A cost by the end of each round, of all models; ``None`` if no round has it."""
    columns = [own for own in run.names if own == name or own.endswith(f"/{name}")]
    rows = [(row[ROUND], [row[own] for own in columns if own in row]) for row in run.rows]
    if not columns:
        return None
    return Curve(
        np.array([index for index, _ in rows]),
        np.cumsum([over_models(values) if values else 0.0 for _, values in rows]),
    )


def megabytes_at(run: LoggedRun, rounds: Numbers) -> Numbers | None:
    """Traffic by the end of given rounds."""
    sent = megabytes(run)
    return None if sent is None else sent.values[np.searchsorted(sent.rounds, rounds)]


def run_end(run: LoggedRun, metric: str, round_idx: float = math.nan) -> tuple[float, float]:
    """Megabytes sent by the evaluation of a round, the last one if it is NaN, and its result.

    Megabytes are NaN if none were counted.
    """
    found = curve(run, metric)
    assert found is not None, "the metric was chosen among those that all runs have"
    at = -1 if math.isnan(round_idx) else int(np.searchsorted(found.rounds, round_idx))
    sent = megabytes_at(run, found.rounds[[at]])
    return (math.nan if sent is None else float(sent[0])), float(found.values[at])


def mean_stage_seconds(runs: Sequence[LoggedRun]) -> dict[str, float]:
    """Seconds of each stage of a round, summed over models and averaged over rounds and runs."""
    found: dict[str, float] = {}
    for run in runs:
        for row in run.rows:
            for name, value in row.items():
                if SECONDS in name:
                    stage = name.partition(SECONDS)[2]
                    found[stage] = found.get(stage, 0.0) + value / len(run.rows) / len(runs)
    return found


def client_statistics(run: LoggedRun, metric: str) -> tuple[str, dict[str, Curve]]:
    """Statistics of an evaluation metric over clients: the metric's name, and a curve for each statistic, by name.

    If clients were evaluated only by other metrics, the first of these is used.
    """
    names = [name.partition(CLIENTS)[2].rpartition("/") for name in sorted(run.names) if CLIENTS in name]
    measured = [name for name, _, _ in names if name]
    chosen = metric if metric in measured else next(iter(measured), metric)
    curves = {statistic: curve(run, f"{CLIENTS}{chosen}/{statistic}") for name, _, statistic in names if name == chosen}
    return chosen, {statistic: found for statistic, found in curves.items() if found is not None}


def spread(statistics: dict[str, Curve]) -> tuple[Curve, Curve, Curve] | None:
    """The low, middle and high curves among statistics over clients; ``None`` unless all three are known."""
    if not {LOW, MIDDLE, HIGH} <= statistics.keys():
        return None
    return statistics[LOW], statistics[MIDDLE], statistics[HIGH]


def clients_at_end(run: LoggedRun, metric: str) -> tuple[float, float, float] | None:
    """The low, middle and high values of a metric over clients, at its last evaluation."""
    found = spread(client_statistics(run, metric)[1])
    return None if found is None else (found[0].last, found[1].last, found[2].last)


def with_metric(
    runs: Sequence[LoggedRun], wanted: str | None, kept: Collection[Path] = ()
) -> tuple[Sequence[LoggedRun], list[str]]:
    """Leave out runs without the metric, or without any, such as those that were killed before the first evaluation.

    Returns:
        The runs to report, with those in the files ``kept``, and why each other one is left out; all runs, if none has
        a metric.
    """
    measured = [run for run in runs if run.path in kept or _has_metric(run, wanted)]
    validated = [run for run in measured if run.path in kept or not all(map(_is_of_a_test, _evaluated(run)))]
    if wanted is None and any(not all(map(_is_of_a_test, _evaluated(run))) for run in validated):
        measured = validated
    if not measured:
        return runs, []
    lacking = [run for run in runs if not any(run is one for one in measured)]
    return measured, [_why_left_out(run, wanted) for run in lacking]


def choose_metric(runs: Sequence[LoggedRun], wanted: str | None) -> str:
    """Choose the evaluation metric to report: the one that is wanted, or the most telling one that all runs have."""
    if wanted is None:
        shared = set.intersection(*map(_evaluated, runs))
        if shared:
            return min(shared, key=_preference)
        raise ReportError(_no_metric(min(runs, key=lambda run: len(_evaluated(run))), len(runs)))
    for run in runs:
        if curve(run, wanted) is None:
            raise ReportError(f"{_lacks(run, wanted)} Choose one that all runs have, or leave this run out.")
    return wanted


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def _plain(run: LoggedRun) -> set[str]:
    """The user's own metrics; those of several models are included without the model's name as well."""
    own = {name for name in run.names if "fl/" not in name and not name.startswith(OVER_BYTES) and not _is_rate(name)}
    parts = _by_model(own, models(run)).values()
    return own | set.intersection(*parts) if parts else own


def _by_model(names: Iterable[str], known: Collection[str]) -> dict[str, set[str]]:
    """Names that begin with a model, without it, for each model."""
    found: dict[str, set[str]] = {model: set() for model in known}
    lengths = {len(model) for model in known}
    for name in names:
        for length in lengths:
            if name[length : length + 1] == "/" and name[:length] in found:
                found[name[:length]].add(name[length + 1 :])
    return found


def _is_rate(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last == "lr" or name.startswith("lr-")  # of Lightning's LearningRateMonitor


def _evaluated(run: LoggedRun) -> set[str]:
    during = run.from_clients.union(*_by_model(run.from_clients, models(run)).values())
    own = (name for name in _plain(run) if name not in during and not name.startswith("train"))
    return {name for name in own if name in run.names or curve(run, name) is not None}


def _has_metric(run: LoggedRun, wanted: str | None) -> bool:
    return bool(_evaluated(run)) if wanted is None else curve(run, wanted) is not None


def _why_left_out(run: LoggedRun, wanted: str | None) -> str:
    if wanted is not None:
        return _lacks(run, wanted)
    if _evaluated(run):
        return f"{run.path} has only {_listed(_evaluated(run))}, of a test, which others were not compared by."
    return _no_metric(run, 1)


def _lacks(run: LoggedRun, metric: str) -> str:
    return f"{run.path} has no metric `{metric}`; it has {_listed(_plain(run))}."


def _is_of_a_test(metric: str) -> bool:
    return metric.rpartition("/")[2].startswith(AFTER_TRAINING)


def _preference(metric: str) -> tuple[bool, bool, bool, bool, str]:
    """Key that sorts validation before tests, metrics of the whole before those of parts, and losses last."""
    known = any(word in metric.lower() for word in HIGHER_IS_BETTER)
    return _is_of_a_test(metric), "/" in metric, lower_is_better(metric), not known, metric


def _no_metric(run: LoggedRun, num_runs: int) -> str:
    shared = " in common with the other runs" if num_runs > 1 else ""
    return (
        f"{run.path} has no evaluation metric{shared}; it has {_listed(_plain(run))}. Log one in `validation_step` and "
        "give the data module `val=`, or choose one with `--metric`, such as `fl/loss`, the clients' training loss"
        f"{'; or leave this run out' if num_runs > 1 else ''}."
    )


def _listed(names: set[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return (", ".join(f"`{name}`" for name in sorted(names)[:MAX_LISTED]) or "no metric of its own") + more
