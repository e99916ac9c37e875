"""Writes the results: tables in Markdown with the paper's numbers beside ours, and one line per run in CSV."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from evidence import Evidence, Store
from grid import Cell, Grid

STORED = " †"  # marks results that were not trained here


@dataclass(frozen=True)
class Metric:
    """A metric of a run.

    Attributes:
        label: Description, with the unit.
        name: Name under which the metric is logged.
        scale: Factor from the logged value to the unit.
        digits: Number of decimal places.
        averaged: Whether to take the mean over all rounds instead of the value after the last one.
    """

    label: str
    name: str
    scale: float = 1.0
    digits: int = 2
    averaged: bool = False

    @property
    def of_layers(self) -> bool:
        """Whether the name is a prefix of several metrics, one for each layer."""
        return self.name.endswith("/")

    def of(self, evidence: Evidence) -> float | None:
        """Return the value of a run; ``None`` if the run diverged or did not log the metric."""
        found = evidence["means" if self.averaged else "final"].get(self.name)
        return None if found is None or evidence["error"] else self.scale * float(found)


METRICS = {
    "accuracy": Metric("test accuracy, %", "val_accuracy", 100.0),
    "training loss": Metric("loss on training examples", "training_loss", digits=3),
    "entropy": Metric("ANME, 0 to 1", "fl/inclusion_entropy", averaged=True),
    "alignment": Metric("cosine with FedAvg's update", "fl/fedavg_alignment"),
    "mean alignment": Metric("cosine with FedAvg's update", "fl/fedavg_alignment", averaged=True),
    "ranks": Metric("entropy rank, share of N", "rank/"),
    "terms visited": Metric("terms held in a round, %", "fl/terms_visited", 100.0, 1, averaged=True),
    "sampling": Metric("sub-models: seconds of a round", "fl/seconds_sample", digits=3, averaged=True),
    "training": Metric("local training: seconds of a round", "fl/seconds_train", digits=3, averaged=True),
    "aggregation": Metric("aggregation: seconds of a round", "fl/seconds_aggregate", digits=3, averaged=True),
    "factorisation": Metric("SVD: seconds of a round", "fl/seconds_refresh", digits=3, averaged=True),
}


def results(store: Store, cell: Cell, seeds: Iterable[int]) -> list[Evidence]:
    """Return the results of the finished runs of a cell."""
    found = (store.read(replace(cell.settings, seed=seed)) for seed in seeds)
    return [evidence for evidence in found if evidence is not None]


def show(runs: Sequence[Evidence], metric: Metric) -> str:
    """Format the mean and deviation over seeds, how many runs diverged, and if any is stored; empty without runs."""
    values = [value for run in runs if (value := metric.of(run)) is not None]
    diverged = sum(bool(run["error"]) for run in runs)
    spread = f" ± {stdev(values):.{metric.digits}f}" if len(values) > 1 else ""
    found = f"{mean(values):.{metric.digits}f}{spread}" if values else ""
    lost = f"{diverged} of {len(runs)} diverged" if diverged else ""
    return ", ".join(filter(None, (found, lost))) + STORED * any(run.get("stored", False) for run in runs)


def markdown(grid: Grid, store: Store, seeds: Sequence[int]) -> str:
    """Return a table for each metric and group: the paper's rows, our columns, then the paper's columns."""
    parts = [f"{grid.title}. {grid.source}".strip()]
    for metric in (METRICS[name] for name in grid.metrics):
        for group, cells in groupby(grid.cells, key=lambda cell: cell.group):
            parts += [f"{group}: {metric.label}", "\n".join(group_table(grid, store, seeds, metric, list(cells)))]
    text = "\n\n".join([*parts, seeds_done(grid, store, seeds)])
    mark = f"{STORED} includes runs that are stored; `--fresh` trains them here." if STORED in text else ""
    return f"{text}{mark}\n"


def group_table(grid: Grid, store: Store, seeds: Sequence[int], metric: Metric, cells: Sequence[Cell]) -> list[str]:
    """Return the lines of one table."""
    shows_paper = metric is METRICS[grid.metrics[0]] and any(grid.paper[cell.group, cell.row] for cell in cells)
    theirs = grid.paper_columns if shows_paper else ()
    titles = list(dict.fromkeys(cell.title for cell in cells))
    lines = [
        row_of("", *titles, *(f"paper: {title}" for title in theirs)),
        row_of(*["---"] * (1 + len([*titles, *theirs]))),
    ]
    for row, own in groupby(cells, key=lambda cell: cell.row):
        ours = [show(results(store, cell, seeds), metric) for cell in own]
        paper = grid.paper[cells[0].group, row] or [""] * len(theirs)
        lines.append(row_of(row, *ours, *(map(str, paper) if shows_paper else ())))
    return lines


def row_of(*cells: str) -> str:
    """Return a line of a table."""
    return f"| {' | '.join(cells)} |"


def seeds_done(grid: Grid, store: Store, seeds: Sequence[int]) -> str:
    """Return a sentence with the number of finished runs of each seed."""
    counts = {}
    for seed in seeds:
        runs = list(grid.runs(seed))
        counts[seed] = f"{sum(store.read(run) is not None for run in runs)} of {len(runs)} runs with seed {seed}"
    return f"Done: {', '.join(counts.values())}. Deviations are over seeds."


def write_csv(grid: Grid, store: Store, seeds: Sequence[int], path: Path) -> None:
    """Write one line per finished run."""
    names = ["group", "row", "column", "seed", *grid.metrics, "total_bytes", "seconds", "peak_bytes", "error", "commit"]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        for cell in grid.cells:
            for run in results(store, cell, seeds):
                writer.writerow(csv_row(grid, cell, run))


def csv_row(grid: Grid, cell: Cell, run: Evidence) -> Mapping[str, Any]:
    """Return the line of one run."""
    values = {name: METRICS[name].of(run) for name in grid.metrics}
    return {
        "group": cell.group,
        "row": cell.row,
        "column": cell.title,
        "seed": run["settings"]["seed"],
        **{name: "" if value is None else f"{value:.4f}" for name, value in values.items()},
        "total_bytes": run["total_bytes"],
        "seconds": run["seconds"],
        "peak_bytes": max(run["peak_bytes"].values(), default=""),
        "error": run["error"][:80],
        "commit": run["commit"],
    }
