"""Writes what the runs of `federated.py` say.

    python studies/zampling/report.py

reads ``outputs/zampling`` and writes ``docs/zampling_tables.md`` and ``docs/zampling.png``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from federated import EVERY, OUTPUT
from matplotlib.axes import Axes
from tables import Run, per_cent, table

from lightning_spectral.report.printed import draw_seeds, legend_above, printed, round_axis
from lightning_spectral.report.style import BASELINE, look

DOCS = Path("docs")
DENSE_BYTES = 4 * 266_610
ROUNDS = (40, 100)  # of the runs that are as published
PAPER = {1: "0.95", 8: "0.95", 32: "0.93"}  # Table 1; for compression 1 section 3.2
LOOKS = {0: BASELINE, 1: look(0), 8: look(1), 32: look(2)}


def results() -> list[Run]:
    """All runs that are done."""
    return [json.loads(path.read_text()) for path in sorted(OUTPUT.glob("*.json"))]


def named(runs: Iterable[Run], setup: str, num_rounds: int, **others: Any) -> list[Run]:
    """Runs of one setup; what is not said is as published."""
    wanted = {"setup": setup, "num_rounds": num_rounds, "lr": 0.1, "server_lr": 1.0, "momentum": 0.0}
    wanted |= {"local_epochs": 1, "decay": False} | others
    return [run for run in runs if all(run[name] == value for name, value in wanted.items())]


def table1(runs: Sequence[Run]) -> list[str]:
    """Table 1: savings from the bytes that travelled, accuracy of the expected and of sampled networks."""
    head = ["m/n", "rounds", "seeds", "uplink saved", "downlink saved", "expected network, %", "sampled ones, %"]
    rows = []
    for compression, num_rounds in product((1, 8, 32), ROUNDS):
        if found := named(runs, "published", num_rounds, compression=compression):
            saved = (f"{DENSE_BYTES / found[0][way]:.1f}" for way in ("up", "down"))
            expected = per_cent([run["accuracy"][-1] for run in found], 2)
            sampled = per_cent([mean(run["sampled"]) for run in found], 2)
            rows.append(
                [str(compression), str(num_rounds), str(len(found)), *saved, expected, sampled, PAPER[compression]]
            )
    return table([*head, "the paper"], rows) if rows else []


def others(runs: Sequence[Run]) -> list[str]:
    """A row for each other run, best first."""
    head = ["setup", "m/n", "rounds", "Adam's lr", "server's lr", "momentum", "local epochs", "cosine"]
    rows = []
    known = [id(run) for num_rounds in ROUNDS for run in named(runs, "published", num_rounds)]
    left = [run for run in runs if id(run) not in known]
    for run in sorted(left, key=lambda run: (-run["num_rounds"], run["compression"], -run["accuracy"][-1])):
        names = ("setup", "compression", "num_rounds", "lr", "server_lr", "momentum", "local_epochs")
        cells = [*(f"{run[name]}" for name in names), "yes" if run["decay"] else ""]
        sampled = per_cent([mean(run["sampled"])], 2) if run["sampled"] else ""
        rows.append([*cells, per_cent([run["accuracy"][-1]], 2), sampled])
    return table([*head, "expected", "sampled"], rows) if rows else []


def figure4(runs: Sequence[Run], axes: Axes) -> None:
    """Figure 4: test accuracy of the expected network against rounds, a band over seeds."""
    for compression, own in LOOKS.items():
        setup, lr = ("published", 0.1) if compression else ("FedAvg", 0.001)
        wanted = {"setup": setup, "compression": compression, "lr": lr}
        found = next(filter(None, (named(runs, num_rounds=n, **wanted) for n in reversed(ROUNDS))), [])
        curves = [[100 * value for value in run["accuracy"]] for run in found]
        rounds = [EVERY * (i + 1) for i in range(len(curves[0]))] if curves else []
        draw_seeds(axes, rounds, curves, own, f"Zampling, m/n = {compression}" if compression else "FedAvg")
    axes.set(ylabel="test accuracy of the expected network, %", ylim=(85, 100))
    round_axis(axes)


def main() -> None:
    runs = results()
    parts = {
        "As published (Table 1 of the paper)": table1(runs),
        "Other choices": others(runs),
    }
    text = "\n\n".join(f"{title}:\n\n" + "\n".join(lines) for title, lines in parts.items() if lines)
    (DOCS / "zampling_tables.md").write_text(text + "\n")
    with printed(DOCS / "zampling.png", 6.5, 4.0) as figure:
        figure4(runs, figure.subplots())
        legend_above(figure, 2)


if __name__ == "__main__":
    main()
