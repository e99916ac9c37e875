"""Writes the results of the study: tables, one line per run, and figures.

    python studies/any_network/report.py

reads ``outputs/any_network`` and writes ``docs/tables/study.csv``, with all runs, and ``docs/tables/study_best.csv``,
with each contender at its best learning rate; what the pages show of the latter, ``docs/study_tables.md`` and
``docs/study_systems_tables.md``; and ``docs/study.svg`` (accuracy against kilobytes) and ``docs/study_curves.svg``
(accuracy against rounds, with bands over seeds). All but the first have only contenders whose ladder of learning rates
was climbed to its end. Runs are also stored in ``docs/runs``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from plans import (
    BOTH,
    HOOKED,
    IN_TIED_CASE,
    LAYOUTS,
    MAIN,
    NEAR_IID,
    NETS,
    OUTPUT,
    PUBLISHED,
    WITHDRAWN,
    final,
    reported,
    results,
)
from records import keep, write_csv
from run import EVERY
from seed_curves import draw_seeds
from setups import CLIPPED, FEW_LABELS, MIXED, SERVERS, SETUPS
from systems import KEEP_RATIO, system_rows
from tasks import ALPHAS, IMAGES, TIED

from lightning_spectral.report.printed import BASELINE, legend_above, look, printed, round_axis

DOCS = Path("docs")
Contender = tuple[str, str]  # a setup and a step of the server
LOOKS: dict[Contender, Any] = {
    ("FedAvg", "averaging"): BASELINE,
    ("FedAvg", "momentum"): look(3),
    ("sharding", "averaging"): look(1),
    ("sharding", "momentum"): look(0),
    ("TopN, published", "averaging"): look(2),
}
Run = Mapping[str, Any]


def label(contender: Contender) -> str:
    """Return the name of a column or a curve."""
    setup, server = contender
    return setup if server == "averaging" else f"{setup}, {server}"


def select(runs: Iterable[Run], **wanted: Any) -> list[Run]:
    """Return the runs that have all the given values."""
    return [run for run in runs if all(run[name] == value for name, value in wanted.items())]


def cell(runs: Sequence[Run], dense: Sequence[Run] = ()) -> str:
    """Format test accuracy in per cent, its deviation over seeds, its mean ratio to FedAvg's, and the learning rate.

    Runs that diverged are counted beside the others, not averaged with them.
    """
    values = {run["seed"]: 100 * final(run, "test") for run in runs if not run["error"]}
    if not values:
        return "diverged" if runs else ""
    spread = f" ± {stdev(values.values()):.1f}" if len(values) > 1 else ""
    shares = [values[run["seed"]] / (100 * final(run, "test")) for run in dense if run["seed"] in values]
    share = f" ({mean(shares):.2f})" if shares else ""
    num_failed = sum(bool(run["error"]) for run in runs)
    failed = f", {num_failed} of {len(runs)} diverged" * bool(num_failed)
    return f"{mean(values.values()):.1f}{spread}{share} at {runs[0]['lr']:g}{failed}"


Grid = tuple[Sequence[str], Mapping[str, Sequence[str]]]  # columns, and the cells of each row


def table(runs: Sequence[Run], contenders: Sequence[Contender], **where: Any) -> Grid:
    """Return a row for each network and a column for each contender; those that were not run are left out."""
    anywhere = {name: value for name, value in where.items() if name != "keep_ratio"}

    def found(net: str, contender: Contender) -> list[Run]:
        setup, server = contender
        return select(runs, net=net, setup=setup, server=server, **(anywhere if setup.endswith("FedAvg") else where))

    rows = [net for net in NETS if any(found(net, one) for one in contenders if one[0] != "FedAvg")]
    columns = [one for one in contenders if any(found(net, one) for net in rows)]
    cells = {
        net: [cell(found(net, one), found(net, ("FedAvg", one[1])) if one[0] != "FedAvg" else ()) for one in columns]
        for net in rows
    }
    return [label(one) for one in columns], cells


def systems(runs: Sequence[Run]) -> Grid:
    """Return a row for each system at about a tenth of the parameters, and a column for each network."""
    one = select(runs, data="MNIST", split=NEAR_IID, seed=0, server="averaging")
    dense = {run["net"]: run for run in select(one, setup="FedAvg")}
    return NETS, system_rows(select(one, keep_ratio=KEEP_RATIO), dense)


def markdown(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a table for a page."""
    lines = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items())])


def tables(runs: Sequence[Run]) -> dict[str, Grid]:
    """Return all tables that have rows, by what they show."""
    groups: dict[str, Sequence[Contender]] = {
        "": [*product(MAIN, BOTH)],
        ", as published": [*product(PUBLISHED, BOTH)],
        ", other steps of the server": [*product(MAIN, [server for server in SERVERS if server != "averaging"])],
        ", other layouts": [(setup, "momentum") for setup in (*MAIN, *LAYOUTS)],
        ", hooks for few labels": [
            (setup, "momentum") for setup in (CLIPPED, *(f"{FEW_LABELS}{one}" for one in (*MAIN, *LAYOUTS)))
        ],
        ", two capacities": [(setup, "momentum") for setup in (*IN_TIED_CASE, CLIPPED, *HOOKED, *WITHDRAWN)],
        ", one part changed": [(setup, "momentum") for setup in SETUPS if setup.startswith("sharding")],
    }
    parts: dict[str, Grid] = {}
    for (data, split), keep_ratio in product(product(IMAGES, (*ALPHAS, TIED)), (0.05, 0.1, 0.2, *MIXED)):
        for name, contenders in groups.items():
            where = {"data": data, "split": split, "keep_ratio": keep_ratio}
            if (keep_ratio in MIXED) != (name == ", two capacities"):
                continue
            if not name or any(
                select(runs, setup=a, server=b, **where) for a, b in contenders if a not in MAIN or b not in BOTH
            ):
                parts[f"{data}, {split}, keep ratio {keep_ratio}{name}"] = table(runs, contenders, **where)
    return {title: grid for title, grid in parts.items() if grid[1]}


def write_tables(runs: Sequence[Run], reported: Sequence[Run]) -> None:
    """Write all runs, the table of each question, and what the pages show."""
    names = ["data", "split", "net", "setup", "server", "keep_ratio", "lr", "seed", "num_rounds"]
    lines = []
    for run in runs:
        scores = [f"{final(run, part):.4f}" for part in ("test", "val")]
        turns = "/".join(f"{turn:.0f}" for turn in run["bytes_per_turn"].values())
        lines.append([*(run[name] for name in names), *scores, turns, run["error"][:80]])
    write_csv("study", [*names, "accuracy", "val_accuracy", "bytes_per_turn", "error"], lines)
    grids = tables(reported)
    cells = [
        [title, net, contender, cell]
        for title, (columns, rows) in grids.items()
        for net, own in rows.items()
        for contender, cell in zip(columns, own, strict=True)
        if cell
    ]
    write_csv("study_best", ["table", "net", "contender", "accuracy (share of FedAvg's) at learning rate"], cells)
    near_iid, *_, most_skewed = ALPHAS  # the page shows the ends
    shown = {split: f"MNIST, {split}, keep ratio {KEEP_RATIO}" for split in (near_iid, most_skewed)}
    parts = [f"{split}:\n\n{markdown(*grids[title])}\n" for split, title in shown.items() if title in grids]
    (DOCS / "study_tables.md").write_text("\n".join(parts))
    (DOCS / "study_systems_tables.md").write_text(f"{markdown(*systems(reported))}\n")


def panels(figure: Figure) -> dict[str, Axes]:
    """Return a pair of axes for each network."""
    axes = dict(zip(NETS, figure.subplots(2, 3, sharey=True).flat, strict=True))
    for net, one in axes.items():
        one.set_title(net)
    return axes


def name_axes(figure: Figure, x: str, y: str) -> None:
    """Name the axes of all panels, and add one legend for them."""
    figure.supxlabel(x)
    figure.supylabel(y)
    legend_above(figure, len(LOOKS))


def accuracy_against_bytes(runs: Sequence[Run], figure: Figure) -> None:
    """Draw one panel per network, with one point per setup and keep ratio; bars span the seeds."""
    for net, axes in panels(figure).items():
        for (setup, server), (colour, marker, _) in LOOKS.items():
            groups: dict[float, list[float]] = defaultdict(list)
            for run in select(runs, net=net, setup=setup, server=server, data="MNIST", split=NEAR_IID):
                if run["keep_ratio"] in (0.1, 0.2, 1.0) and run["bytes_per_turn"]:
                    groups[mean(run["bytes_per_turn"].values()) / 1e3].append(100 * final(run, "test"))
            sizes, name = sorted(groups), label((setup, server))
            centre = [mean(groups[size]) for size in sizes]
            below = [c - min(groups[size]) for c, size in zip(centre, sizes, strict=True)]
            above = [max(groups[size]) - c for c, size in zip(centre, sizes, strict=True)]
            axes.errorbar(
                sizes, centre, [below, above], color=colour, marker=marker, label=name, capsize=2, markersize=7
            )
        axes.set_xlim(left=0)
        by_error(axes)
    name_axes(figure, "kilobytes of a client's turn, down and up", "test accuracy after 100 rounds, %")


def by_error(axes: Axes) -> None:
    """Space accuracies by the logarithm of the error, so that 93 and 95 % can be told apart where others fail."""
    axes.set_yscale("function", functions=(lambda percent: -np.log(101 - percent), lambda y: 101 - np.exp(-y)))
    axes.set_ylim(0, 98)
    axes.set_yticks([0, 50, 80, 90, 95], minor=False)


def accuracy_against_rounds(runs: Sequence[Run], figure: Figure) -> None:
    """Draw one panel per network, with the mean over seeds and a band from the worst to the best.

    Of some of the oldest runs only the last accuracy is left; they are not drawn.
    """
    near = [run for run in select(runs, data="MNIST", split=NEAR_IID, error="") if len(run["test"]) > 1]
    for net, axes in panels(figure).items():
        for (setup, server), style in LOOKS.items():
            drawn = [
                run for run in select(near, net=net, setup=setup, server=server) if run["keep_ratio"] in (0.1, 1.0)
            ]
            curves = [[100 * value for value in run["test"]] for run in drawn]
            rounds = [EVERY * (i + 1) for i in range(len(curves[0]))] if curves else []
            draw_seeds(axes, rounds, curves, style, label((setup, server)))
        round_axis(axes)
        axes.set_xlabel("")  # all panels share it
    name_axes(figure, "round", "test accuracy, %")


def main() -> None:
    keep(OUTPUT)
    runs = reported(results())
    write_tables(results(), runs)
    with printed(DOCS / "study.svg", 9.5, 5.2) as figure:
        accuracy_against_bytes(runs, figure)
    with printed(DOCS / "study_curves.svg", 9.5, 5.2) as figure:
        accuracy_against_rounds(runs, figure)


if __name__ == "__main__":
    main()
