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


def read_grid(name: str, text: Mapping[str, Any], scale: str) -> Grid:
    """Return the grid of a table or figure at a scale.

    Args:
        name: Name of its file.
        text: Content of the file.
        scale: One of `SCALES`.

    Raises:
        ValueError: If a row names an unknown setting, or if its paper values do not match the columns in number.
    """
    tasks = yaml.safe_load(TASKS.read_text())
    columns: Mapping[str, Mapping[str, Any]] = text.get("columns", {"": {}})
    cells, paper = [], {}
    shown = [", ".join(filter(None, pair)) for pair in product(text["tasks"]["gpu"], columns)]
    for group, part in text["groups"].items():
        common = {**text.get("settings", {}), **part.get("settings", {})}
        for row, given in part["rows"].items():
            entry = given if isinstance(given, Mapping) else {"paper": given}
            paper[group, row] = entry.get("paper") or []
            if len(paper[group, row]) not in (0, len(shown)):
                raise ValueError(f"{name}.yaml, {group}, {row}: {len(paper[group, row])} numbers for columns {shown}.")
            own = {"setup": row, **common, **entry.get("settings", {})}
            for task, (column, options) in product(text["tasks"][scale], columns.items()):
                settings = settings_of({**tasks[task], **own, **options}, f"{name}.yaml, {group}, {row}")
                cells.append(Cell(group, row, task, column, settings))
    figures = text.get("figures", [])
    return Grid(name, text["title"], text["source"], text["metrics"], figures, cells, shown, paper)
