"""The sections of a report: a picture or a table if the runs have the data, otherwise what to switch on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import offset_copy

from lightning_spectral.report import compared, measures, printed
from lightning_spectral.report.compared import LAST, Group
from lightning_spectral.report.measures import Curve, Numbers
from lightning_spectral.report.printed import COLOURS, GREY, INK, LEGEND_COLUMNS, PAPER, Look, Picture
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
BITS = {  # of Zampling: titles of their panels
    "fl/bit_entropy": "entropy of a bit",
    "fl/bits_agreed": "bits on which all clients agree",
    "fl/probs_settled": "probabilities that are 0 or 1",
    "fl/bit_disagreement": "bits in which two clients differ",
    "fl/probs_moved": "how far a client moves a probability",
}
ENDS_OF_CLIENTS = ("low end of the clients", "middle of the clients", "high end of the clients")
MAX_CLIENTS = 200
LOG_FROM = 20  # costs that span more than this factor get a logarithmic axis
GAP = 8.0  # points between the bars of groups that sent the same
SAME = 0.02  # costs are the same if they differ by less than this share of all that is shown
HATCHES = ("", "///", "...")  # for when the colours repeat
TITLE = 36  # letters that fit above a heat map
MAX_HEAT_MAPS = 9
FEW = 6  # rounds that are each marked on the axis
SMALLEST, LARGEST = 1e-4, 0.1  # where the scale of singular values may begin, as shares of the layer's largest
MAX_CELLS = 4_000_000  # of a heat map, which has far fewer pixels; with more, rounds are skipped

OfRun = Callable[[LoggedRun], Curve | None]


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

    @property
    def costed(self) -> bool:
        """Whether megabytes were counted, and tell groups apart."""
        sent = np.array([compared.group_end(group, self.metric)[:, 0].mean() for group in self.groups])
        return bool(np.isfinite(sent).all() and (len(sent) == 1 or np.ptp(sent) > SAME * sent.max()))


def all_sections(contents: Contents) -> list[Section]:
    """Every section of a report, in order."""
    drawn = (pareto_section, costs_section, curves_section, fairness_section, coverage_section, bits_section)
    return [part(contents) for part in (*drawn, seconds_section, spectra_section, clients_section, settings_section)]


def pareto_section(contents: Contents) -> Section:
    """Every run's result against what was sent until then; below it, the spread over clients."""
    groups, metric = contents.groups, contents.metric
    title, of = f"{metric} against megabytes", f"{metric}, last {LAST}"
    remark = " ".join(filter(None, (compared.on_repetitions(groups, metric), compared.on_lengths(groups, metric))))
    rows = []
    for group in groups:
        for run in group.runs:
            cost, value = compared.run_end(run, metric)
            lost = () if np.isfinite(value) else (f"{metric} is {value} in its last {LAST} evaluations",)
            rounds = int(measures.evaluations(run, metric).rounds[-1]) + 1
            rows.append((group.label, run.name, rounds, _short(value), _short(cost), "; ".join((*run.notes, *lost))))
    of_runs = Table(("group", "run", "rounds", of, "megabytes", "remarks"), tuple(rows))
    tables = (("Groups", compared.groups_table(groups, metric, contents.minimise)), ("All runs", of_runs))
    said = (
        f"Results are means of the last {LAST} evaluations, or of all if there are fewer, because a single one varies; "
        "the best one beside them is chosen in hindsight."
    )
    if not contents.costed:
        counted = all(measures.megabytes(run) for run in contents.runs)
        why = "All groups sent the same, so nothing is drawn against megabytes." if counted else SWITCH_ON["bytes"]
        return Section(metric, said, None, tables, f"{remark} {why}".strip(), num_open=1)
    with_clients = any(measures.spread(run, metric) for run in contents.runs)
    lead = (
        f"{said} Small marks are runs, up to the last evaluation that all repetitions have; large marks are means, "
        "with their standard deviations. The dashed line joins the groups that no other group beats in both respects."
        + (" Below, each group's clients from the low to the high end." if with_clients else "")
    )
    ends = [compared.group_end(group, metric) for group in groups]
    means = np.array([points.mean(axis=0) for points in ends])

    def draw(figure: Figure) -> None:
        axes = printed.panels(figure, 1 + with_clients, columns=1, sharex=True)
        for group, points, (x, y) in zip(groups, ends, means, strict=True):
            look = look_of(group)
            if len(points) > 1:
                x_std, y_std = points.std(axis=0, ddof=1)
                axes[0].errorbar(x, y, xerr=x_std, yerr=y_std, fmt="none", ecolor=look.colour, elinewidth=1, zorder=2)
                axes[0].plot(*points.T, marker=look.marker, ms=4, ls="none", color=look.colour, alpha=0.6)
            style: dict[str, Any] = {"marker": look.marker, "ms": 7 + 2 * look.width, "ls": "none", "mec": PAPER}
            axes[0].plot(x, y, color=look.colour, label=group.label, **style)
        if with_clients:
            for index, (group, x) in enumerate(zip(groups, means[:, 0], strict=True)):
                # bars of about the same cost stand side by side
                near = np.flatnonzero(abs(means[:, 0] - x) <= SAME * np.ptp(means[:, 0]))
                shift = GAP * (near.searchsorted(index) - (len(near) - 1) / 2)
                found = [three for run in group.runs if (three := measures.spread(run, metric)) is not None]
                if found:  # a bar from low to high clients, with a mark in the middle, shifted sideways
                    low, middle, high = np.mean([[one.last for one in three] for three in found], axis=0)
                    look, at = look_of(group), offset_copy(axes[1].transData, figure, x=shift, units="points")
                    axes[1].update_datalim([(x, low), (x, high)])  # shifted artists are not included automatically
                    axes[1].plot([x, x], [low, high], color=look.colour, lw=2.5, transform=at)
                    axes[1].plot(x, middle, marker=look.marker, ms=7, color=look.colour, mec=PAPER, transform=at)
            of_clients = measures.client_statistics(groups[0].runs[0], metric)[0]
            axes[1].set_ylabel(printed.as_label(f"{of_clients} of clients"))
        front = compared.pareto_front(list(means[:, 0]), list(means[:, 1]), contents.minimise)
        if len(front) > 1:
            axes[0].plot(*means[front].T, color=INK, lw=1, ls="--", zorder=1)
        axes[0].set_ylabel(printed.as_label(of))
        cost_axis(axes[-1], [cost for points in ends for cost in points[:, 0]])
        printed.legend_above(figure, LEGEND_COLUMNS)

    height = 6.4 if with_clients else 4.2
    picture = Picture("pareto", f"{title}: a point for each run.", draw, height, [group.label for group in groups])
    return Section(title, lead, picture, tables, remark, num_open=1)


def costs_section(contents: Contents) -> Section:
    """What it takes to reach a target, and what is reached for the same megabytes."""
    groups, metric, target = contents.groups, contents.metric, contents.target
    tables, lead = [], "Mean and standard deviation over the runs of a group."
    if target is None:
        lead += " `--target VALUE` adds what it costs to reach a value."
    else:
        caption = f"Until {metric} is {'at most' if contents.minimise else 'at least'} {target:g}"
        tables.append((caption, compared.target_table(groups, metric, target, contents.minimise)))
    if (equal := compared.equal_cost_table(groups, metric)) is not None:
        tables.append((f"{metric} for the same megabytes, last evaluation", equal))
    remark = "" if tables else SWITCH_ON["bytes"]
    return Section("Cost", lead, None, tuple(tables), remark, num_open=len(tables))


def curves_section(contents: Contents) -> Section:
    """The metric over the course of the run: against rounds and, if all runs counted them, against megabytes."""
    groups, metric, costed = contents.groups, contents.metric, contents.costed

    def draw(figure: Figure) -> None:
        axes = printed.panels(figure, 1 + costed, sharey=True)
        for group in groups:
            if (found := measures.band(group.each(partial(measures.curve, metric=metric)))) is not None:
                draw_band(axes[0], group, found, found.rounds + 1)
                if costed:
                    sent = np.mean([measures.megabytes_at(run, found.rounds) for run in group.runs], axis=0)
                    draw_band(axes[1], group, found, sent)
        axes[0].set_ylabel(printed.as_label(metric))
        printed.round_axis(axes[0])
        if costed:
            cost_axis(axes[1], [sent.last for group in groups for sent in group.each(measures.megabytes)])
        printed.legend_above(figure, LEGEND_COLUMNS)

    title = f"{metric} over rounds" + " and over megabytes" * costed
    lead = "Mean of each group over the rounds that all its repetitions have, plus and minus one standard deviation."
    picture = Picture("curves", f"{title}: a line for each group.", draw, 3.8, [group.label for group in groups])
    return Section(title, lead, picture, remark=compared.on_curves(groups, metric))


def fairness_section(contents: Contents) -> Section:
    """How much clients differ, over rounds."""
    if not (able := [run for run in contents.runs if measures.spread(run, contents.metric)]):
        return Section("Fairness", remark=SWITCH_ON["clients"])
    metric = measures.client_statistics(able[0], contents.metric)[0]
    found = [(run.name, measures.client_statistics(run, contents.metric)[1]) for run in contents.runs]
    names = sorted({statistic for _, statistics in found for statistic in statistics})
    rows = [(run, *(_short(own[name].last) if name in own else "" for name in names)) for run, own in found]

    def end(run: LoggedRun, position: int) -> Curve | None:
        return three[position] if (three := measures.spread(run, metric)) else None

    panels = [Panel(title, partial(end, position=index)) for index, title in enumerate(ENDS_OF_CLIENTS)]
    lead = f"{metric} of single clients: the ends and the middle of its distribution, over rounds."
    description = f"{metric} of clients over rounds."
    picture = over_rounds("fairness", description, contents.groups, panels, metric, sharey=True)
    return Section("Fairness", lead, picture, (("Last evaluation of clients", Table(("run", *names), tuple(rows))),))


def coverage_section(contents: Contents) -> Section:
    """Shares of singular terms that were trained."""
    names = ("fl/terms_visited", "fl/expected_coverage")
    visited, expected = (partial(measures.curve, metric=name, of_all=False) for name in names)
    if not any(of(run) for run in contents.runs for of in (visited, expected)):
        return Section("Coverage", remark=SWITCH_ON["coverage"])
    lead = "Share of all singular terms held by at least one client of the round; dotted, the expected share."
    panels = [Panel("", visited, expected, (0, 1.03))]
    label, description = "share of terms held", "Share of terms held, over rounds."
    return Section("Coverage", lead, over_rounds("coverage", description, contents.groups, panels, label))


def bits_section(contents: Contents) -> Section:
    """How far the bits of Zampling are decided."""
    gap = f"{contents.metric}/sampling_gap"  # of `SampledNetworks`
    panels = []
    for name, title in {**BITS, gap: f"{contents.metric}: expected minus sampled"}.items():
        of = partial(measures.curve, metric=name, of_all=False)
        if any(measures.band(group.each(of)) for group in contents.groups):
            top = None if name == "fl/probs_moved" else 1.03  # clients move it by hundredths
            panels.append(Panel(title, of, limits=None if name == gap else (0, top)))
    if not panels:
        return Section("Bits", remark=SWITCH_ON["bits"])
    lead = "Zampling: means over all bits of a round, and how much better the expected network is than sampled ones."
    return Section("Bits", lead, over_rounds("bits", "How far bits are decided, over rounds.", contents.groups, panels))


def seconds_section(contents: Contents) -> Section:
    """Wall-clock time by stage."""
    title, labels = "Where the time went", [group.label for group in contents.groups]
    times = [measures.mean_stage_seconds(group.runs) for group in contents.groups]
    stages = {stage: sum(one.get(stage, 0.0) for one in times) for one in times for stage in one}
    if not stages:
        return Section(title, remark=SWITCH_ON["seconds"])

    def draw(figure: Figure) -> None:
        axes, at, left = figure.subplots(), range(len(times)), np.zeros(len(times))
        for index, stage in enumerate(sorted(stages, key=lambda name: -stages[name])):  # the longest first
            widths = np.array([one.get(stage, 0.0) for one in times])
            colour, hatch = COLOURS[index % len(COLOURS)], HATCHES[index // len(COLOURS) % len(HATCHES)]
            axes.barh(at, widths, 0.6, left, color=colour, edgecolor=PAPER, hatch=hatch, lw=0.5, label=stage)
            left += widths
        axes.set_yticks(at, ["\n".join(printed.in_lines(label, 40)) for label in labels])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds per round")
        printed.legend_above(figure, 6)

    picture = Picture("seconds", "Seconds of a round by stage.", draw, 1.2 + 0.45 * len(times))
    names, lead = sorted(stages), "Mean wall-clock seconds of a round, by stage, without evaluation."
    rows = tuple((label, *(_short(one.get(n, 0.0)) for n in names)) for label, one in zip(labels, times, strict=True))
    return Section(title, lead, picture, (("Seconds per round", Table(("group", *names), rows)),))


def spectra_section(contents: Contents) -> Section:
    """Singular values over rounds, with a heat map for each layer of each group's first run that has some."""
    by_group = [next(filter(None, map(measures.spectra, group.runs)), {}) for group in contents.groups]
    named = [(group.label, own) for group, own in zip(contents.groups, by_group, strict=True)]
    layers = dict.fromkeys(layer for own in by_group for layer in own)
    shown = [(heat_map_title(layer, name), own[layer]) for layer in layers for name, own in named if layer in own]
    if not shown:
        return Section("Singular values", remark=SWITCH_ON["spectra"])
    left_out = len(shown) - MAX_HEAT_MAPS
    more = f" {left_out} more are not shown." if left_out > 0 else ""
    lead = (
        "For each layer in the first run of each group, as shares of the layer's largest in all rounds. They are known "
        f"to within the bins of a histogram: those that are smaller than a bin look the same.{more}"
    )
    shown, longest = shown[:MAX_HEAT_MAPS], max(len(title) for title, _ in shown)

    def draw(figure: Figure) -> None:
        axes = printed.panels(figure, len(shown), columns=3)
        found = []  # for each, its rounds, shape (R,), and singular values, shape (R, N), NaN where a round has fewer
        for _, by_round in shown:
            kept, width = sorted(by_round), max(map(len, by_round.values()))
            kept = kept[:: -(-len(kept) * width // MAX_CELLS)]
            padded = [np.pad(by_round[i], (0, width - len(by_round[i])), constant_values=np.nan) for i in kept]
            found.append((np.array(kept, dtype=np.float64), np.array(padded)))
        known = min(float(np.nanmin(values) / np.nanmax(values)) for _, values in found)
        smallest = min(max(known, SMALLEST), LARGEST)  # what is smaller looks the same
        scale = LogNorm(smallest, 1.0)
        for panel, (title, _), (rounds, values) in zip(axes, shown, found, strict=True):
            shares = np.maximum(values / np.nanmax(values), smallest)
            terms = np.arange(values.shape[1] + 1) + 0.5
            around = np.pad(rounds, 1, "reflect", reflect_type="odd")
            around += (np.arange(len(around)) - 1) * (len(rounds) == 1)  # whose reflections are itself
            edges = (around[1:] + around[:-1]) / 2 + 1  # halfway: each column is centred on its own round
            panel.pcolormesh(edges, terms, shares.T, norm=scale, cmap="viridis", rasterized=True)
            panel.set_title("\n".join(title))
            panel.grid(visible=False)
            panel.invert_yaxis()
            panel.yaxis.set_major_locator(MaxNLocator(integer=True))
            printed.round_axis(panel)
            if len(rounds) <= FEW:
                panel.set_xticks(rounds + 1)
        axes[0].set_ylabel("term, the largest first")
        bar = figure.colorbar(ScalarMappable(scale, "viridis"), ax=axes, location="bottom", shrink=0.6, aspect=40)
        bar.set_label("singular value / the layer's largest")

    height = 0.8 + (2.6 + 0.15 * longest) * -(-len(shown) // 3)
    picture = Picture("spectra", "Heat maps of singular values over rounds.", draw, height)
    return Section("Singular values", lead, picture)


def heat_map_title(layer: str, group: str) -> list[str]:
    """Lines that are no wider than a panel; a layer's name is broken between its parts."""
    of_layer = printed.in_lines(layer.replace(".", ". "), TITLE)
    return [*(line.replace(". ", ".") for line in of_layer), *printed.in_lines(group, TITLE)]


def clients_section(contents: Contents) -> Section:
    """The last known values of single clients."""
    found = [(run, model, *one) for run in contents.runs for model, one in measures.client_tables(run).items()]
    if not found:
        return Section("Clients", remark=SWITCH_ON["table"])
    sites = [(model, table) for _, model, _, table in found if model.endswith(measures.CROSS_SITE)][:MAX_HEAT_MAPS]

    def draw(figure: Figure) -> None:
        for axes, (model, table) in zip(printed.panels(figure, len(sites), columns=2), sites, strict=True):
            first = table.columns.index("examples") + 1  # before it, ids and names
            values = [[float(cell.split()[0]) if cell else np.nan for cell in row[first:]] for row in table.rows]
            figure.colorbar(axes.imshow(values, cmap="viridis"), ax=axes)
            axes.set_xticks(range(len(values[0])), map(printed.as_label, table.columns[first:]), rotation=90)
            axes.set_yticks(range(len(values)), [printed.as_label(row[first - 2]) for row in table.rows])
            axes.set(title=printed.as_label(model), xlabel="model of", ylabel="examples of")
            axes.grid(visible=False)

    height = 0.5 + 3.6 * -(-len(sites) // 2)
    picture = Picture("cross_site", "Heat maps of models of single clients, on all.", draw, height) if sites else None
    tables, more = [], any(len(table.rows) > MAX_CLIENTS for *_, table in found)
    for run, model, index, table in found:
        kept = [position for position, name in enumerate(table.columns) if name != "round"]  # which the caption has
        rows = (tuple(_short(row[position]) for position in kept) for row in table.rows[:MAX_CLIENTS])
        caption = ", ".join(filter(None, (run.name, model, f"round {index + 1}")))
        tables.append((caption, Table(tuple(table.columns[position] for position in kept), tuple(rows))))
    lead = f"The first {MAX_CLIENTS} clients of each table." if more else ""
    return Section("Clients", lead, picture, tuple(tables), num_open=len(tables) if sites else 0)


def settings_section(contents: Contents) -> Section:
    """The settings that all runs have in common, so that a page documents its origin."""
    settings = [compared.flat_settings(run.config) for run in contents.runs]
    same = [(name, value) for name, value in settings[0].items() if all(one.get(name) == value for one in settings)]
    if not same:
        return Section("Settings", remark="No setting is the same in all runs, or none was logged.")
    table = Table(("setting", "value"), tuple(same))
    return Section("Settings", tables=((f"The same in all runs: {len(same)}", table),))


def _short(value: Any) -> Any:
    """A number in four digits, empty if it is unknown; whatever else a table has, as it is."""
    return value if not isinstance(value, float) else "" if np.isnan(value) else f"{value:.4g}"


# -- what several sections draw


def look_of(group: Group) -> Look:
    """The look of a group; FedAvg, with which others are compared, is grey on every page."""
    return printed.look(group.index)._replace(colour=GREY) if group.is_baseline else printed.look(group.index)


def draw_band(axes: Axes, group: Group, found: Curve, x: Numbers) -> None:
    """Draw a mean with its band. Overlapping curves stay visible: later ones are thinner, with other marks."""
    printed.draw_line(axes, x, found.values, look_of(group), group.label, first_mark=group.index)
    if found.std is not None and found.std.any():
        printed.draw_spread(axes, x, found.values - found.std, found.values + found.std, look_of(group))


def cost_axis(axes: Axes, costs: Sequence[float]) -> None:
    """Set up an axis of megabytes, logarithmic if they span a wide range."""
    axes.set_xlabel("megabytes sent, both ways, all clients")
    positive = [cost for cost in costs if cost > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        printed.log_axis(axes)


class Panel(NamedTuple):
    """The contents of one panel over rounds."""

    title: str
    of: OfRun
    dotted: OfRun | None = None  # what was expected
    limits: tuple[float, float | None] | None = None  # of the axis


def over_rounds(
    name: str, description: str, groups: Sequence[Group], shown: Sequence[Panel], label: str = "", **shared: Any
) -> Picture:
    """A picture with one curve of each group, with its band, in each panel."""

    def draw(figure: Figure) -> None:
        axes = printed.panels(figure, len(shown), columns=3, **shared)
        for panel, one in zip(axes, shown, strict=True):
            for group in groups:
                if (found := measures.band(group.each(one.of))) is not None:
                    draw_band(panel, group, found, found.rounds + 1)
                if one.dotted is not None and (expected := measures.band(group.each(one.dotted))) is not None:
                    panel.plot(expected.rounds + 1, expected.values, ls=":", color=look_of(group).colour)
            panel.set_title("\n".join(printed.in_lines(one.title, 60)))
            if one.limits is not None:
                panel.set_ylim(*one.limits)
            printed.round_axis(panel)
        axes[0].set_ylabel(printed.as_label(label))
        printed.legend_above(figure, LEGEND_COLUMNS)

    height = 1.0 + 2.4 * -(-len(shown) // 3)
    return Picture(name, description, draw, height, [group.label for group in groups])
