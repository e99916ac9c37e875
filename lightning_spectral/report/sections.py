"""The sections of a report: a picture or a table if the runs have the data, otherwise what to switch on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lightning_spectral.report import figures
from lightning_spectral.report.compared import (
    equal_cost_table,
    groups_table,
    on_curves,
    on_lengths,
    run_end,
    target_table,
)
from lightning_spectral.report.figures import INCHES, Panel, Picture, Size
from lightning_spectral.report.groups import Group, flat_settings
from lightning_spectral.report.measures import (
    Curve,
    band,
    client_statistics,
    client_tables,
    curve,
    evaluations,
    mean_stage_seconds,
    megabytes,
    spectra,
    spread,
)
from lightning_spectral.report.printed import legend_lines
from lightning_spectral.report.runs import LoggedRun, Table

# What to switch on if a section has nothing to show.
SWITCH_ON = {
    "bytes": "No bytes were logged: `RoundHistory` keeps `fl/bytes_down` and `fl/bytes_up` of every round.",
    "clients": "No evaluation of single clients in these runs: hold out examples with "
    "`FederatedDataModule(client_val_fraction=0.2)`, and add `ClientEvaluation()` to the callbacks.",
    "spectra": "No singular values in these runs: add `RoundDashboard()` to the callbacks.",
    "coverage": "No coverage in these runs: `SpectralSharding` logs `fl/terms_visited`, and `SpectralDiagnostics()` "
    "what was expected.",
    "bits": "No bits in these runs: `Zampling` logs `fl/bit_entropy` and the like, and `SampledNetworks()` logs how "
    "much worse sampled networks are than the expected one.",
    "seconds": "No stage was timed: `RoundHistory` keeps `fl/seconds_...` of every round.",
    "table": "No client table in these runs: add `RoundDashboard()` to the callbacks.",
}
COVERAGE = ("terms_visited", "expected_coverage")
MOVED = "fl/probs_moved"
BITS = {  # of Zampling, with the titles of their panels
    "fl/bit_entropy": "entropy of a bit",
    "fl/bits_agreed": "bits on which all clients agree",
    "fl/probs_settled": "probabilities that are 0 or 1",
    "fl/bit_disagreement": "bits in which two clients differ",
    MOVED: "how far a client moves a probability",
}
MAX_HEAT_MAPS = 9
MAX_CLIENTS = 200
LEGEND_WIDE, LEGEND_NARROW = (3, INCHES["wide"]), (1, INCHES["narrow"])  # columns at most, and inches


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading of its own."""

    title: str
    lead: str = ""  # what there is to see
    picture: Picture | None = None
    tables: tuple[tuple[str, Table], ...] = ()  # each under a caption
    remark: str = ""  # what to switch on if there is nothing to show, or what to know of the picture
    num_open: int = 0  # how many of the tables can be seen at once; the others unfold


@dataclass(frozen=True)
class Contents:
    """The subject of the sections."""

    groups: Sequence[Group]
    metric: str
    minimise: bool
    target: float | None = None  # a value of the metric, of which the cost is asked

    @property
    def runs(self) -> list[LoggedRun]:
        """All runs, group by group."""
        return [run for group in self.groups for run in group.runs]


def all_sections(contents: Contents) -> list[Section]:
    """Every section of a report, in order."""
    drawn = (pareto_section, costs_section, curves_section, fairness_section, coverage_section, bits_section)
    return [part(contents) for part in (*drawn, seconds_section, spectra_section, clients_section, settings_section)]


def pareto_section(contents: Contents) -> Section:
    """The first figure."""
    title = f"{contents.metric} against megabytes"
    tables = (("Groups", groups_table(contents.groups, contents.metric)), ("All runs", _runs_table(contents)))
    remark = on_lengths(contents.groups, contents.metric)
    if not all(megabytes(run) for run in contents.runs):
        return Section(title, "", None, tables, f"{SWITCH_ON['bytes']} {remark}".strip(), num_open=1)
    with_clients = any(spread(run, contents.metric) for run in contents.runs)
    lead = (
        "Small marks are runs, at the last evaluation that all repetitions have; large marks are means of repetitions, "
        "with their standard deviations. The dashed line joins the groups that no other group beats in both respects."
        + (" Below, each group's clients from the low to the high end." if with_clients else "")
    )
    height = 6.4 if with_clients else 4.2
    draw = partial(figures.pareto, groups=contents.groups, metric=contents.metric, minimise=contents.minimise)
    picture = _picture(contents, "pareto", f"{title}: a point for each run.", draw, Size(height, height - 0.8))
    return Section(title, lead, picture, tables, remark, num_open=1)


def costs_section(contents: Contents) -> Section:
    """What it takes to reach a target, and what is reached for the same megabytes."""
    groups, metric, target = contents.groups, contents.metric, contents.target
    tables = []
    if target is not None:
        caption = f"Until {metric} is {'at most' if contents.minimise else 'at least'} {target:g}"
        tables.append((caption, target_table(groups, metric, target, contents.minimise)))
    if (equal := equal_cost_table(groups, metric)) is not None:
        tables.append((f"{metric} for the same megabytes", equal))
    remark = "" if tables else SWITCH_ON["bytes"]
    more = "" if target is not None else " `--target VALUE` adds what it costs to reach a value."
    lead = f"Mean and standard deviation over the runs of a group.{more}"
    return Section("Cost", lead, None, tuple(tables), remark, num_open=len(tables))


def curves_section(contents: Contents) -> Section:
    """The metric over the course of the run."""
    title = f"{contents.metric} over rounds and over megabytes"
    lead = "Mean of each group over the rounds that all its repetitions have, plus and minus one standard deviation."
    draw = partial(figures.curves, groups=contents.groups, metric=contents.metric)
    picture = _picture(contents, "curves", f"{title}: a line for each group.", draw, Size(3.8, 5.6))
    return Section(title, lead, picture, remark=on_curves(contents.groups, contents.metric))


def fairness_section(contents: Contents) -> Section:
    """How much clients differ, over rounds."""
    able = [run for run in contents.runs if spread(run, contents.metric)]
    if not able:
        return Section("Fairness", remark=SWITCH_ON["clients"])
    metric = client_statistics(able[0], contents.metric)[0]
    found = [(run.name, client_statistics(run, contents.metric)[1]) for run in contents.runs]
    names = sorted({statistic for _, statistics in found for statistic in statistics})
    rows = [(run, *(_short(own[name].last) if name in own else "" for name in names)) for run, own in found]
    ends = ("low end of the clients", "middle of the clients", "high end of the clients")
    panels = [Panel(title, partial(_end_of_clients, metric=metric, position=index)) for index, title in enumerate(ends)]
    draw = partial(figures.over_rounds, groups=contents.groups, shown=panels, label=metric, sharey=True)
    return Section(
        "Fairness",
        f"{metric} of single clients: the ends and the middle of its distribution, over rounds.",
        _picture(contents, "fairness", f"{metric} of clients over rounds.", draw, Size(3.4, 7.4)),
        (("Last evaluation of clients", Table(("run", *names), tuple(rows))),),
    )


def _end_of_clients(run: LoggedRun, metric: str, position: int) -> Curve | None:
    return None if (three := spread(run, metric)) is None else three[position]


def coverage_section(contents: Contents) -> Section:
    """Shares of singular terms that were trained."""
    visited, expected = (partial(curve, metric=f"fl/{name}", of_all=False) for name in COVERAGE)
    if not any(of(run) for run in contents.runs for of in (visited, expected)):
        return Section("Coverage", remark=SWITCH_ON["coverage"])
    lead = "Share of all singular terms held by at least one client of the round; dotted, the expected share."
    panel = Panel("", visited, expected, (0, 1.03))
    draw = partial(figures.over_rounds, groups=contents.groups, shown=[panel], label="share of terms held")
    picture = _picture(contents, "coverage", "Share of terms held, over rounds.", draw, Size(3.4, 3.0))
    return Section("Coverage", lead, picture)


def bits_section(contents: Contents) -> Section:
    """How far the bits of Zampling are decided."""
    gap = f"{contents.metric}/sampling_gap"  # of `SampledNetworks`
    titles = {**BITS, gap: f"{contents.metric}: expected minus sampled"}
    panels = []
    for name, title in titles.items():
        of = partial(curve, metric=name, of_all=False)
        if any(band(group.each(of)) for group in contents.groups):
            limits = None if name == gap else (0, None if name == MOVED else 1.03)  # clients move it by hundredths
            panels.append(Panel(title, of, limits=limits))
    if not panels:
        return Section("Bits", remark=SWITCH_ON["bits"])
    lead = "Zampling: means over all bits of a round, and how much better the expected network is than sampled ones."
    draw = partial(figures.over_rounds, groups=contents.groups, shown=panels)
    size = Size(0.4 + 2.4 * -(-len(panels) // 3), 0.4 + 2.3 * len(panels))
    return Section("Bits", lead, _picture(contents, "bits", "How far bits are decided, over rounds.", draw, size))


def seconds_section(contents: Contents) -> Section:
    """Wall-clock time by stage."""
    times = {group.label: mean_stage_seconds(group.runs) for group in contents.groups}
    stages = sorted({stage for one in times.values() for stage in one})
    if not stages:
        return Section("Where the time went", remark=SWITCH_ON["seconds"])
    rows = tuple((name, *(_short(one.get(stage, 0.0)) for stage in stages)) for name, one in times.items())
    height = 1.2 + 0.45 * len(contents.groups)
    draw = partial(figures.seconds, groups=contents.groups)
    return Section(
        "Where the time went",
        "Mean wall-clock seconds of a round, by stage, without evaluation.",
        _picture(contents, "seconds", "Seconds of a round by stage.", draw, Size(height, height + 1.2), legend=False),
        (("Seconds per round", Table(("group", *stages), rows)),),
    )


def spectra_section(contents: Contents) -> Section:
    """Singular values over rounds."""
    found = {group.label: next((one for run in group.runs if (one := spectra(run))), {}) for group in contents.groups}
    layers = dict.fromkeys(layer for by_layer in found.values() for layer in by_layer)
    shown = [
        figures.HeatMap(layer, name, own[layer]) for layer in layers for name, own in found.items() if layer in own
    ]
    if not shown:
        return Section("Singular values", remark=SWITCH_ON["spectra"])
    left_out = len(shown) - MAX_HEAT_MAPS
    more = f" {left_out} more are not shown." if left_out > 0 else ""
    lead = (
        "For each layer in the first run of each group, as shares of the layer's largest in all rounds. They are known "
        f"to within the bins of a histogram: those that are smaller than a bin look the same.{more}"
    )
    draw = partial(figures.heat_maps, shown=shown[:MAX_HEAT_MAPS])
    panels, title = min(len(shown), MAX_HEAT_MAPS), 0.15 * max(len(one.lines) for one in shown)
    size = Size(0.8 + (2.7 + title) * -(-panels // 3), 0.8 + (2.5 + title) * panels)
    return Section("Singular values", lead, Picture("spectra", "Heat maps of singular values over rounds.", draw, size))


def clients_section(contents: Contents) -> Section:
    """The last known values of single clients."""
    tables = [(run, model, *found) for run in contents.runs for model, found in client_tables(run).items()]
    if not tables:
        return Section("Clients", remark=SWITCH_ON["table"])
    shown = tuple(
        (", ".join(filter(None, (run.name, model, f"round {index + 1}"))), _first_clients(table))
        for run, model, index, table in tables
    )
    more = any(len(table.rows) > MAX_CLIENTS for *_, table in tables)
    return Section("Clients", f"The first {MAX_CLIENTS} clients of each table." if more else "", tables=shown)


def settings_section(contents: Contents) -> Section:
    """The settings that all runs have in common, so that a page documents its origin."""
    settings = [flat_settings(run.config) for run in contents.runs]
    same = [(name, value) for name, value in settings[0].items() if all(one.get(name) == value for one in settings)]
    if not same:
        return Section("Settings", remark="No setting is the same in all runs, or none was logged.")
    return Section(
        "Settings", tables=((f"The same in all runs: {len(same)}", Table(("setting", "value"), tuple(same))),)
    )


def _first_clients(table: Table) -> Table:
    """The table without its rounds, which the caption has."""
    kept = [index for index, name in enumerate(table.columns) if name != "round"]
    rows = (_cells([row[index] for index in kept]) for row in table.rows[:MAX_CLIENTS])
    return Table(tuple(table.columns[index] for index in kept), tuple(rows))


def _runs_table(contents: Contents) -> Table:
    columns = ("group", "run", "rounds", contents.metric, "megabytes", "remarks")
    rows = []
    for group in contents.groups:
        for run in group.runs:
            cost, value = run_end(run, contents.metric)
            rounds = int(evaluations(run, contents.metric).rounds[-1]) + 1
            notes = [*run.notes, *([] if np.isfinite(value) else [f"its last {contents.metric} is {value}"])]
            rows.append((group.label, run.name, rounds, _short(value), _short(cost), "; ".join(notes)))
    return Table(columns, tuple(rows))


def _picture(contents: Contents, name: str, description: str, draw: Any, size: Size, legend: bool = True) -> Picture:
    """Make a picture with room for the legend above it."""
    labels = [group.label for group in contents.groups]
    wide, narrow = (0.2 * legend_lines(labels, *fits) if legend else 0.0 for fits in (LEGEND_WIDE, LEGEND_NARROW))
    return Picture(name, description, draw, Size(size.wide + wide, size.narrow + narrow))


def _cells(row: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(_short(value) if isinstance(value, float) else value for value in row)


def _short(value: float) -> str:
    return "" if np.isnan(value) else f"{value:.4g}"
