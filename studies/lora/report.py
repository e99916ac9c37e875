"""Writes the results of `run.py`; runs that are not done yet are left out.

    python studies/lora/report.py

reads ``outputs/lora`` and ``outputs/lora_vit``, and writes ``docs/tables/lora_shakespeare.csv``, what the page shows of
it, ``docs/lora_tables.md``, and ``docs/lora_shakespeare.svg``; and ``docs/tables/lora_vit.csv`` and
``docs/lora_vit.svg``. All runs of the tables are also stored in ``docs/runs``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from records import keep, restore, write_csv
from run import TASKS, Task
from seed_curves import draw_seeds

from lightning_spectral.report.printed import BASELINE, Look, legend_above, log_axis, look, printed

DOCS = Path("docs")
NAMES = list(TASKS["shakespeare"].setups)  # the same for all tasks
REFERENCE = NAMES[-1]  # the others are compared with it: small adapters for all
EQUAL_RANKS = (BASELINE, Look("#999999", "x", 1.6))
LOOKS = dict(zip(NAMES, [*map(look, range(len(NAMES) - len(EQUAL_RANKS))), *EQUAL_RANKS], strict=True))
Run = Mapping[str, Any]
Runs = Mapping[str, Mapping[int, Run]]  # setup -> seed -> run


@dataclass(frozen=True, eq=False)
class Page:
    """The table and figure of a task.

    Attributes:
        task: The task.
        table: File name of the table that the page shows, if it shows one.
        figure: File name of its figure.
        axis: Label of the figure's vertical axis.
        digits: Decimal places.
    """

    task: Task
    table: str | None
    figure: str
    axis: str
    digits: int

    @property
    def more(self) -> str:
        """Whether good runs have less or more of the measured figure."""
        return "less" if self.task.best is min else "more"

    @property
    def head(self) -> list[str]:
        """The names of the columns."""
        name = self.task.figure
        head = ["aggregation", "seeds", "learning rate", name, f"{self.more}, paired", "MB in all", "of it the base"]
        return [*head, f"{name} at equal MB"]

    def chosen_runs(self) -> dict[str, dict[int, Run]]:
        """Return the runs at the best learning rate of their setup."""
        best, runs = self.task.best_rates(), self.task.results()
        return {
            setup: {run["seed"]: run for run in runs if run["setup"] == setup and run["rate"] == rate}
            for setup, rate in best.items()
        }

    def at(self, run: Run, megabytes: float) -> float:
        """Return the figure after the last round by which at most this many megabytes have been sent."""
        pairs = zip(run["megabytes"], run[self.task.figure], strict=True)
        return self.task.end([figure for sent, figure in pairs if sent <= megabytes])

    def with_spread(self, values: Sequence[float]) -> str:
        """Format the mean and, for two or more values, the sample standard deviation; a dash for none."""
        spread = f" ± {stdev(values):.{self.digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{self.digits}f}{spread}" if values else "-"

    def row(self, setup: str, runs: Runs, equal: float) -> list[str]:
        """Return the cells of one setup.

        Args:
            setup: Name of the setup.
            runs: All runs.
            equal: Megabytes at which all setups are compared.
        """
        own, reference = runs[setup], runs.get(REFERENCE, {})
        last = {seed: self.task.last(run) for seed, run in own.items()}
        gains = [value - self.task.last(reference[seed]) for seed, value in last.items() if seed in reference]
        paired = [-gain if self.task.best is min else gain for gain in gains]
        return [
            setup,
            str(len(own)),
            f"{self.task.best_rates()[setup]:g}",
            self.with_spread(list(last.values())),
            "" if setup == REFERENCE else self.with_spread(paired),
            f"{mean(run['megabytes'][-1] for run in own.values()):.1f}",
            f"{mean(run['of it base'][-1] for run in own.values()):.1f}",
            self.with_spread([self.at(run, equal) for run in own.values()]),
        ]

    def write(self, runs: Runs) -> None:
        """Write a row for each setup, and for the page a description of the runs and the columns that matter most."""
        every = [run for of_setup in runs.values() for run in of_setup.values()]
        equal, curve = min(run["megabytes"][-1] for run in every), every[0][self.task.figure]
        if len(starts := {f"{run[self.task.figure][0]:.{self.digits}f}" for run in every}) > 1:
            raise SystemExit(
                f"Runs in {self.task.output} begin with the {self.task.figure} {' and '.join(sorted(starts))}, so they "
                "fine-tune different networks; remove those of one, whose network another machine has pre-trained."
            )
        rows = [self.row(setup, runs, equal) for setup in runs]
        write_csv(Path(self.figure).stem, self.head, rows)
        if self.table is None:
            return
        averaged = f", the last {self.task.averaged} averaged" if self.task.averaged > 1 else ""
        text = (
            f"{len(curve) - 1} rounds{averaged}, from {curve[0]:.{self.digits}f}. Paired: by how much it ends "
            f"{'below' if self.task.best is min else 'above'} `{REFERENCE}` of the same seed. "
            f"[All columns](tables/{Path(self.figure).stem}.csv) include the {self.task.figure} after {equal:.1f} MB, "
            "which is all that the thriftiest run has sent."
        )
        shown = [[row[column] for column in (0, 3, 4, 5)] for row in (self.head, ["---"] * len(self.head), *rows)]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in shown)
        (DOCS / self.table).write_text(f"{text}\n\n{lines}")

    def draw(self, runs: Runs, figure: Figure) -> None:
        """Draw the figure against megabytes: the mean over seeds, and a band from the lowest to the highest value."""
        axes = figure.subplots()
        for setup, of_setup in runs.items():
            sent = [mean(column) for column in zip(*(run["megabytes"] for run in of_setup.values()), strict=True)]
            draw_seeds(axes, sent, [run[self.task.figure] for run in of_setup.values()], LOOKS[setup], setup)
        axes.set(xlabel="megabytes, down and up, with the base", ylabel=self.axis)
        log_axis(axes)
        axes.set_xlim(left=min(run["megabytes"][1] for of_setup in runs.values() for run in of_setup.values()))
        legend_above(figure, 3)


PAGES = (
    Page(TASKS["shakespeare"], "lora_tables.md", "lora_shakespeare.svg", "perplexity of a character", 3),
    Page(TASKS["vit"], None, "lora_vit.svg", "accuracy, %", 1),
)


def main() -> None:
    for page in PAGES:
        restore(page.task.output)
    chosen = {page: runs for page in PAGES if (runs := page.chosen_runs())}
    if not chosen:
        raise SystemExit("No setup has been run with all learning rates yet: call `run.py` first.")
    for page, runs in chosen.items():
        keep(page.task.output)
        page.write(runs)
        with printed(DOCS / page.figure, 7.5, 4.5) as figure:
            page.draw(runs, figure)


if __name__ == "__main__":
    main()
