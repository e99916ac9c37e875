"""Writes the results of `federated.py`.

    python studies/zampling/report.py

reads ``outputs/zampling`` and writes ``docs/zampling_tables.md``, ``docs/zampling.svg`` and
``docs/tables/zampling_*.csv`` for the paper's network, and ``docs/zampling_conv4.md`` for FedPM's. All runs are also
stored in ``docs/runs``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from typing import Any

from federated import EVERY
from matplotlib.axes import Axes
from plans import FEW_IMAGES, MAIN_TASK, OUTPUT, STOPPING, downlink, fedpm, posteriors, results, stopped
from records import keep, write_csv
from seed_curves import draw_seeds
from tables import Rows, Run, per_cent, table

from lightning_spectral.report.printed import BASELINE, legend_above, look, printed, round_axis

DOCS = Path("docs")
DENSE_BYTES = dict.fromkeys((MAIN_TASK, STOPPING, FEW_IMAGES), 4 * 266_610) | {"Conv-4": 4 * 1_933_258}
ROUNDS = (40, 100)  # of the runs with the published settings
PAPER = {1: "0.95", 8: "0.95", 32: "0.93"}  # from Table 1; for compression 1 from section 3.2
LOOKS = {0: BASELINE, 1: look(0), 8: look(1), 32: look(2)}
SETTINGS = ("setup", "compression", "num_rounds", "lr", "server_lr", "momentum", "local_epochs", "decay", "task")


def named(runs: Iterable[Run], setup: str, num_rounds: int, **others: Any) -> list[Run]:
    """Return the runs of one setup; settings that are not given are as published."""
    wanted = {"setup": setup, "num_rounds": num_rounds, "lr": 0.1, "server_lr": 1.0, "momentum": 0.0}
    wanted |= {"local_epochs": 1, "decay": False, "task": MAIN_TASK} | others
    return [run for run in runs if all(run[name] == value for name, value in wanted.items())]


def settings(run: Run) -> tuple[Any, ...]:
    """Return the settings that a run shares with runs that differ only in the seed."""
    return tuple(run[name] for name in SETTINGS)


def by_settings(runs: Iterable[Run]) -> list[list[Run]]:
    """Group the runs that differ only in their seeds."""
    return [list(group) for _, group in groupby(sorted(runs, key=settings), key=settings)]


def expected(runs: Sequence[Run]) -> str:
    """Format the test accuracy of the expected network."""
    return per_cent([run["accuracy"][-1] for run in runs], 2)


def sampled(runs: Sequence[Run]) -> str:
    """Format the mean test accuracy of sampled networks; empty if there are none."""
    return per_cent([mean(run["sampled"]) for run in runs], 2) if runs[0]["sampled"] else ""


def saved(run: Run, way: str) -> str:
    """Format the ratio of FedAvg's bytes in a direction to those of a run."""
    return f"{DENSE_BYTES[run['task']] / run[way]:.1f}"


def table1(runs: Sequence[Run]) -> Rows:
    """Return Table 1: savings in the bytes that were sent, and accuracy of the expected and of sampled networks."""
    head = ["m/n", "rounds", "seeds", "uplink saved", "downlink saved", "expected network, %", "sampled ones, %"]
    rows = []
    for compression, num_rounds in product((1, 8, 32), ROUNDS):
        if found := named(runs, "published", num_rounds, compression=compression):
            cells = [str(compression), str(num_rounds), str(len(found)), saved(found[0], "up"), saved(found[0], "down")]
            rows.append([*cells, expected(found), sampled(found), PAPER[compression]])
    return [*head, "the paper"], rows


def others(runs: Sequence[Run]) -> Rows:
    """Return a row for each other setting, best first; settings that only save bytes have their own table."""
    head = ["setup", "m/n", "rounds", "Adam's lr", "server's lr", "momentum", "local epochs", "cosine", "seeds"]
    published = {settings(run) for num_rounds in ROUNDS for run in named(runs, "published", num_rounds)}
    left = [run for run in runs if settings(run) not in published]
    groups = by_settings(run for run in left if "bits down" not in run["setup"])
    groups.sort(key=lambda g: (-g[0]["num_rounds"], g[0]["compression"], -mean(run["accuracy"][-1] for run in g)))
    rows = []
    for group in groups:
        cells = [*(f"{group[0][name]}" for name in SETTINGS[:7]), "yes" if group[0]["decay"] else "", str(len(group))]
        rows.append([*cells, expected(group), sampled(group)])
    return [*head, "expected", "sampled"], rows


def of_plan(plan: Iterable[Any], runs: Sequence[Run]) -> Rows:
    """Return a row for each setting of a plan that was run, with the bytes of a client's turn."""
    head = ["setup", "m/n", "seeds", "bytes down", "bytes up", "downlink saved", "uplink saved", "expected", "sampled"]
    done = {settings(group[0]): group for group in by_settings(runs)}
    wanted = dict.fromkeys(tuple(getattr(spec, name) for name in SETTINGS) for spec in plan)  # seeds share a row
    rows = []
    for group in filter(None, map(done.get, wanted)):
        first = group[0]
        cells = [first["setup"], str(first["compression"] or ""), str(len(group))]
        sizes = [f"{first['down']:,.0f}", f"{first['up']:,.0f}", saved(first, "down"), saved(first, "up")]
        rows.append([*cells, *sizes, expected(group), sampled(group)])
    return head, rows


def figure4(runs: Sequence[Run], axes: Axes) -> None:
    """Draw Figure 4: test accuracy of the expected network against rounds, with a band over seeds.

    Runs of which only the last accuracy is left are not drawn.
    """
    whole = [run for run in runs if len(run["accuracy"]) == run["num_rounds"] // EVERY]
    for compression, own in LOOKS.items():
        setup, lr = ("published", 0.1) if compression else ("FedAvg", 0.001)
        wanted = {"setup": setup, "compression": compression, "lr": lr}
        found = next(filter(None, (named(whole, num_rounds=n, **wanted) for n in reversed(ROUNDS))), [])
        curves = [[100 * value for value in run["accuracy"]] for run in found]
        rounds = [EVERY * (i + 1) for i in range(len(curves[0]))] if curves else []
        draw_seeds(axes, rounds, curves, own, f"Zampling, m/n = {compression}" if compression else "FedAvg")
    axes.set(ylabel="test accuracy of the expected network, %", ylim=(85, 100))
    round_axis(axes)


def write_main_task(runs: Sequence[Run]) -> None:
    """Write the tables and the figure of the paper's network."""
    main_task = [run for run in runs if run["task"] == MAIN_TASK]
    (DOCS / "zampling_tables.md").write_text("\n".join(table(*table1(main_task))) + "\n")
    write_csv("zampling_others", *others(main_task))
    for plan in (stopped, downlink, posteriors):
        write_csv(f"zampling_{plan.__name__}", *of_plan(plan(), runs))
    with printed(DOCS / "zampling.svg", 6.5, 4.0) as figure:
        figure4(main_task, figure.subplots())
        legend_above(figure, 2)


def main() -> None:
    keep(OUTPUT)
    runs = results()
    if any(run["task"] == MAIN_TASK for run in runs):
        write_main_task(runs)
    head, conv4 = of_plan(fedpm(), runs)
    if conv4:
        (DOCS / "zampling_conv4.md").write_text("\n".join(table(head, conv4)) + "\n")


if __name__ == "__main__":
    main()
