"""The grids of runs defined by the YAML files, each for a table or figure of a paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from settings import Settings, settings_of

TASKS = Path(__file__).parent / "tasks.yaml"
SCALES = ("gpu", "cpu", "toy")  # the papers' sizes, hours on one core, seconds


@dataclass(frozen=True)
class Cell:
    """One number of a table, with a run for each seed.

    Attributes:
        group: Heading of its part of the table.
        row: Name of its row.
        task: Name of the task.
        column: Its column among those of the task; may be empty.
        settings: Settings of the run with seed 0.
    """

    group: str
    row: str
    task: str
    column: str
    settings: Settings

    @property
    def names(self) -> tuple[str, str, str]:
        """Its row, its task and its keep ratio, by which it can be chosen."""
        kept = self.settings.keep_ratio
        return self.row, self.task, "whole" if kept is None else "mixed" if isinstance(kept, Mapping) else f"{kept:g}"

    @property
    def title(self) -> str:
        """Heading of its column."""
        return ", ".join(word for word in (self.task, self.column) if word)


@dataclass(frozen=True)
class Grid:
    """A table or figure of a paper, read from ``grids/<name>.yaml``.

    Attributes:
        name: Name of the file.
        title: What the table or figure shows.
        source: The paper, and the place in it.
        metrics: The metrics in the table, names of `tables.METRICS`.
        figures: The metrics drawn against rounds, names of `tables.METRICS`, or ``holders``, drawn against terms.
        cells: All numbers at one scale, in order.
        paper_columns: Headings of the paper's numbers.
        paper: The paper's numbers by group and row, as printed.
    """

    name: str
    title: str
    source: str
    metrics: Sequence[str]
    figures: Sequence[str]
    cells: Sequence[Cell]
    paper_columns: Sequence[str]
    paper: Mapping[tuple[str, str], Sequence[str]]

    def runs(self, seed: int) -> Iterator[Settings]:
        """Yield the settings of all cells with a seed, without duplicates, task by task."""
        order = list(dict.fromkeys(cell.task for cell in self.cells))
        cells = sorted(self.cells, key=lambda cell: order.index(cell.task))
        runs = (replace(cell.settings, seed=seed) for cell in cells)
        yield from {run.key: run for run in runs}.values()

    def choose(self, rows: Sequence[str], tasks: Sequence[str], keep_ratios: Sequence[str]) -> Grid:
        """Return the grid with only some rows, tasks and keep ratios; all of those of which none is named."""
        wanted = [set(map(plain, names)) for names in (rows, tasks, keep_ratios)]
        cells = [
            cell
            for cell in self.cells
            if all(not names or plain(own) in names for names, own in zip(wanted, cell.names, strict=True))
        ]
        return replace(self, cells=cells)


def plain(name: str) -> str:
    """Return a name without what is easily typed differently: "Top-n" and "TopN" are the same."""
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")


def read_grid(name: str, text: Mapping[str, Any], scale: str) -> Grid:
    """Return the grid of a table or figure at a scale.

    Args:
        name: Name of its file.
        text: Content of the file; without tasks for ``toy``, its task is ``toy``.
        scale: One of `SCALES`.

    Raises:
        ValueError: If there are no tasks for the scale, if a task or a setting is unknown, or if a row's paper values
            do not match the columns in number.
    """
    tasks, of_scale = yaml.safe_load(TASKS.read_text()), {"toy": ["toy"], **text["tasks"]}
    if scale not in of_scale:
        raise ValueError(f"{name}.yaml has no tasks for the scale {scale}; it has some for {', '.join(of_scale)}.")
    if unknown := sorted(set(of_scale[scale]) - set(tasks)):
        raise ValueError(f"{name}.yaml: there is no task {', '.join(unknown)}; there are {', '.join(tasks)}.")
    columns: Mapping[str, Mapping[str, Any]] = text.get("columns", {"": {}})
    cells, paper = [], {}
    shown = [", ".join(filter(None, pair)) for pair in product(of_scale.get("gpu", ()), columns)]
    for group, part in text["groups"].items():
        common = {**text.get("settings", {}), **part.get("settings", {})}
        for row, given in part["rows"].items():
            entry = given if isinstance(given, Mapping) else {"paper": given}
            paper[group, row] = entry.get("paper") or []
            if len(paper[group, row]) not in (0, len(shown)):
                raise ValueError(f"{name}.yaml, {group}, {row}: {len(paper[group, row])} numbers for columns {shown}.")
            setup = {key: entry[key] for key in ("class_path", "init_args") if key in entry} or row
            own = {"setup": setup, **common, **entry.get("settings", {})}
            for task, (column, options) in product(of_scale[scale], columns.items()):
                settings = settings_of({**tasks[task], **own, **options}, f"{name}.yaml, {group}, {row}")
                cells.append(Cell(group, row, task, column, settings))
    title, source = text.get("title", name), text.get("source", "")
    metrics, figures = text.get("metrics", ["accuracy"]), text.get("figures", [])
    return Grid(name, title, source, metrics, figures, cells, shown, paper)
