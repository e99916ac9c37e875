"""The measures of a run in a report: an evaluation metric, the cost of reaching it, and how clients fared."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_spectral.arguments import first_of
from lightning_spectral.errors import ReportError
from lightning_spectral.report.runs import ROUND, Histogram, LoggedRun, Table

BYTES = ("fl/bytes_down", "fl/bytes_up", "fl/bytes_measuring")  # all that is sent in a round
SECONDS = "fl/seconds_"  # before the name of a stage
CLIENTS = "fl/clients/"  # of `ClientEvaluation`: ``fl/clients/<metric>/<statistic>``
ENDS = LOW, MIDDLE, HIGH = ("lowest_decile", "mean", "highest_decile")
SPECTRUM = "singular_values/"  # a histogram for each layer, of `RoundDashboard`
CLIENT_TABLE = "tables/clients"
CROSS_SITE = "cross-site"  # the end of the name of a table whose columns are the models of its clients
LOWER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "nll", "wer")
HIGHER_IS_BETTER = ("acc", "f1", "auc", "auroc", "iou", "precision", "recall")
MAX_LISTED = 20  # metrics in a message
MAX_TERMS = 1_000_000  # of a layer; no matrix has a dimension that large
Numbers: TypeAlias = npt.NDArray[np.float64]
Spectrum: TypeAlias = dict[int, Numbers]  # singular values of a layer in descending order, by round


@dataclass(frozen=True)
class Curve:
    """One metric over the communication rounds that have it, counted from 0."""

    rounds: Numbers
    values: Numbers
    std: Numbers | None = None  # of the repetitions of which the values are means

    @property
    def last(self) -> float:
        return float(self.values[-1])


def band(curves: Sequence[Curve]) -> Curve | None:
    """Mean and deviation (0 for one repetition) over the rounds that all repetitions have; ``None`` without any."""
    shared = sorted(set.intersection(*(set(one.rounds) for one in curves))) if curves else []
    if not shared:
        return None
    values = np.array([one.values[np.searchsorted(one.rounds, shared)] for one in curves])
    std = values.std(axis=0, ddof=1) if len(curves) > 1 else np.zeros(len(shared))
    return Curve(np.array(shared), values.mean(axis=0), std)


def curve(run: LoggedRun, metric: str, of_all: bool = True) -> Curve | None:
    """A metric over rounds, ``None`` without it; with several models, the mean over all, or over those that have it."""
    columns = [metric] if metric in run.names else [f"{model}/{metric}" for model in models(run)]
    if not of_all:
        columns = [name for name in columns if name in run.names]
    if not (rows := [row for row in run.rows if columns and all(name in row for name in columns)]):
        return None
    values = np.array([[row[name] for name in columns] for row in rows]).mean(axis=1)
    return Curve(np.array([row[ROUND] for row in rows]), values)


def evaluations(run: LoggedRun, metric: str) -> Curve:
    """The curve of the metric that was chosen among those that all runs have."""
    found = curve(run, metric)
    assert found is not None, "all runs have the metric"
    return found


def models(run: LoggedRun) -> list[str]:
    """Names of the models of a run that trains several; the names of their metrics begin with them."""
    return sorted({name.partition("/fl/")[0] for name in run.names if "/fl/" in name})


def total(run: LoggedRun, names: Sequence[str], combine: Callable[[list[float]], float] = math.fsum) -> Curve | None:
    """What was spent by the end of each round, of all models; ``None`` if no round has any of the names."""
    columns = [own for own in run.names if own in names or own.endswith(tuple(f"/{name}" for name in names))]
    if not columns:
        return None
    each = ([row[own] for own in columns if own in row] for row in run.rows)
    spent = np.cumsum([combine(values) if values else 0.0 for values in each])
    return Curve(np.array([row[ROUND] for row in run.rows]), spent)


def megabytes(run: LoggedRun) -> Curve | None:
    """Traffic by the end of each round: down, up and for measuring, of all clients and models, in 10^6 bytes."""
    sent = total(run, BYTES)
    return None if sent is None else Curve(sent.rounds, sent.values / 1e6)


def megabytes_at(run: LoggedRun, rounds: Numbers) -> Numbers:
    """Traffic by the end of given rounds; NaN if it was not counted."""
    sent = megabytes(run)
    return np.full(len(rounds), math.nan) if sent is None else sent.values[np.searchsorted(sent.rounds, rounds)]


def mean_stage_seconds(runs: Sequence[LoggedRun]) -> dict[str, float]:
    """Seconds of each stage of a round, summed over models and averaged over rounds and runs."""
    found: dict[str, float] = defaultdict(float)
    for run in runs:
        for name, value in (item for row in run.rows for item in row.items() if SECONDS in item[0]):
            found[name.partition(SECONDS)[2]] += value / len(run.rows) / len(runs)
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


def spread(run: LoggedRun, metric: str) -> list[Curve] | None:
    """The low, middle and high curves of a metric over clients; ``None`` unless all three are known."""
    found = client_statistics(run, metric)[1]
    return [found[end] for end in ENDS] if found.keys() >= {*ENDS} else None


def spectra(run: LoggedRun) -> dict[str, Spectrum]:
    """Singular values of each layer, to within the width of a bin; with several models, by model and layer."""
    found: dict[str, Spectrum] = {}
    for name, by_round in run.shown.items():
        model, is_spectrum, layer = name.rpartition(SPECTRUM)
        values: Spectrum = {}
        for index, bins in by_round.items():
            if is_spectrum and isinstance(bins, Histogram) and 0 < sum(bins.counts) <= MAX_TERMS:
                edges = np.array(bins.edges)
                values[index] = np.repeat((edges[1:] + edges[:-1]) / 2, np.array(bins.counts, dtype=int))[::-1]
        if any(own.max() > 0 for own in values.values()):
            found[model + layer] = values
    return found


def client_tables(run: LoggedRun) -> dict[str, tuple[int, Table]]:
    """The last client table of each model, and its round."""
    found: dict[str, tuple[int, Table]] = {}
    for name, by_round in run.shown.items():
        tables = {index: one for index, one in by_round.items() if isinstance(one, Table)}
        if name.endswith(CLIENT_TABLE) and tables:
            found[name.removesuffix(CLIENT_TABLE).rstrip("/")] = max(tables), tables[max(tables)]
    return found


def choose_metric(
    runs: Sequence[LoggedRun], wanted: str | None = None, named: Collection[Path] = ()
) -> tuple[str, Sequence[LoggedRun], list[str]]:
    """Choose the metric to report, which is wanted or the most telling one of all runs, and the runs that have it.

    Others, such as those that were killed before the first evaluation, are left out unless their files were ``named``;
    the texts say why.
    """
    if wanted is not None:
        able = [run for run in runs if curve(run, wanted) is not None]
    else:
        validated = [run for run in runs if not all(_preference(metric)[0] for metric in _evaluated(run))]
        able = validated or [run for run in runs if _evaluated(run)]
    read = [run for run in runs if run in able or run.path in named] if able else runs
    left_out = [_lacks(run, wanted, 1) for run in runs if run not in read]
    if wanted is not None:
        if without := [run for run in read if run not in able]:
            raise ReportError(f"{_lacks(without[0], wanted, 1)} Choose one that all runs have, or leave this run out.")
        return wanted, read, left_out
    if not (shared := set.intersection(*map(_evaluated, read))):
        raise ReportError(_lacks(min(read, key=lambda run: len(_evaluated(run))), None, len(read)))
    return min(shared, key=_preference), read, left_out


def lower_is_better(metric: str) -> bool:
    """Whether lower values of a metric are better, by its name."""
    return any(word in metric.lower() for word in LOWER_IS_BETTER)


def _own(run: LoggedRun, names: Collection[str]) -> set[str]:
    """The user's own metrics; those that all of several models have are included without the model's name as well."""
    own = {name for name in names if not ("fl/" in name or f"/{name}".endswith("/lr") or name.startswith("lr-"))}
    parts = [{name.removeprefix(f"{model}/") for name in own if name.startswith(f"{model}/")} for model in models(run)]
    return own | set.intersection(*parts) if parts else own


def _evaluated(run: LoggedRun) -> set[str]:
    during = _own(run, run.from_clients)
    own = (name for name in _own(run, run.names) if name not in during and not name.startswith("train"))
    return {name for name in own if name in run.names or curve(run, name) is not None}


def _preference(metric: str) -> tuple[bool, bool, bool, bool, str]:
    """Key that sorts validation before tests, metrics of the whole before those of parts, and losses last."""
    is_of_a_test = metric.rpartition("/")[2].startswith("test")
    known = any(word in metric.lower() for word in HIGHER_IS_BETTER)
    return is_of_a_test, "/" in metric, lower_is_better(metric), not known, metric


def _lacks(run: LoggedRun, wanted: str | None, num_runs: int) -> str:
    """Why a run cannot be reported."""
    own = _own(run, run.names)
    listed = first_of([f"`{name}`" for name in sorted(own)], MAX_LISTED) or "no metric of its own"
    if wanted is not None:
        return f"{run.path} has no metric `{wanted}`; it has {listed}."
    if num_runs == 1 and _evaluated(run):
        return f"{run.path} has only {listed}, of a test, which others were not compared by."
    shared = " in common with the other runs" if num_runs > 1 else ""
    return (
        f"{run.path} has no evaluation metric{shared}; it has {listed}. Log one in `validation_step` and give the data "
        "module `val=`, or choose one with `--metric`, such as `fl/loss`, the clients' training loss"
        f"{'; or leave this run out' if num_runs > 1 else ''}."
    )
