"""Writes what the runs of `run.py` say; runs that are not done yet are left out.

    python studies/lora/report.py

reads ``outputs/lora`` and ``outputs/lora_vit``, and writes ``docs/lora_tables.md`` and ``docs/lora_shakespeare.png``,
``docs/lora_vit_tables.md`` and ``docs/lora_vit.png``. All runs of the tables are kept in ``docs/runs``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

sys.path.append(str(Path(__file__).parents[1]))  # which has what the studies share
from records import keep, restore
from run import RATES, TASKS, Task

from lightning_spectral.report.printed import draw_seeds, legend_above, log_axis, printed
from lightning_spectral.report.style import BASELINE, Look, look

DOCS = Path("docs")
NAMES = list(TASKS["shakespeare"].setups)  # those of all tasks
REFERENCE = NAMES[-1]  # what the others are compared with: small adapters for all
LOOKS = dict(zip(NAMES, [*(look(index) for index in range(7)), BASELINE, Look("#999999", "x", 1.6)], strict=True))
Run = Mapping[str, Any]
Runs = Mapping[str, Mapping[int, Run]]  # of each setup, by seed


@dataclass(frozen=True, eq=False)
class Page:
    """How the runs of a task are told.

    Attributes:
        task: The task.
        table: File name of its table.
        figure: File name of its figure.
        axis: What the figure's vertical axis says.
        digits: Decimal places.
    """

    task: Task
    table: str
    figure: str
    axis: str
    digits: int

    @property
    def more(self) -> str:
        """What good runs have, compared with others."""
        return "less" if self.task.best is min else "more"

    @property
    def head(self) -> list[str]:
        """Names of the columns."""
        name = self.task.figure
        head = ["aggregation", "seeds", "learning rate", name, f"{self.more}, paired", "MB in all", "of it the base"]
        return [*head, f"{name} at equal MB"]

    def chosen_runs(self) -> dict[str, dict[int, Run]]:
        """The runs at the best learning rate of their setup."""
        best, runs = self.task.best_rates(), self.task.results()
        return {
            setup: {run["seed"]: run for run in runs if run["setup"] == setup and run["rate"] == rate}
            for setup, rate in best.items()
        }

    def at(self, run: Run, megabytes: float) -> float:
        """What the figure is after the last round by which no more than so many megabytes have travelled."""
        pairs = zip(run["megabytes"], run[self.task.figure], strict=True)
        return self.task.end([figure for sent, figure in pairs if sent <= megabytes])

    def with_spread(self, values: Sequence[float]) -> str:
        """Mean and, of two or more, sample standard deviation; a dash for none."""
        spread = f" ± {stdev(values):.{self.digits}f}" if len(values) > 1 else ""
        return f"{mean(values):.{self.digits}f}{spread}" if values else "-"

    def row(self, setup: str, runs: Runs, equal: float) -> list[str]:
        """Cells of one setup.

        Args:
            setup: Its name.
            runs: All runs.
            equal: Megabytes at which all are compared.
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

    def text(self, runs: Runs) -> str:
        """What was run, and a row for each setup."""
        every = [run for of_setup in runs.values() for run in of_setup.values()]
        equal, curve = min(run["megabytes"][-1] for run in every), every[0][self.task.figure]
        averaged = f", the last {self.task.averaged} averaged" if self.task.averaged > 1 else ""
        rates = ", ".join(f"{rate:g}" for rate in RATES)
        text = (
            f"{len(curve) - 1} rounds{averaged}; ± is the standard deviation over seeds. The learning rate is the best "
            f"of {rates} in seed 0. Before fine-tuning the {self.task.figure} is {curve[0]:.{self.digits}f}. "
            f"Paired: by how much it ends {'below' if self.task.best is min else 'above'} `{REFERENCE}` of the same "
            f"seed. Equal: after {equal:.1f} MB, which is all that the thriftiest run has sent."
        )
        rows = [self.row(setup, runs, equal) for setup in runs]
        lines = [f"| {' | '.join(cells)} |" for cells in (self.head, ["---"] * len(self.head), *rows)]
        return f"{text}\n\n" + "\n".join(lines) + "\n"

    def draw(self, runs: Runs, figure: Figure) -> None:
        """The figure against megabytes: the mean over seeds, and a band from the lowest to the highest."""
        axes = figure.subplots()
        for setup, of_setup in runs.items():
            sent = [mean(column) for column in zip(*(run["megabytes"] for run in of_setup.values()), strict=True)]
            draw_seeds(axes, sent, [run[self.task.figure] for run in of_setup.values()], LOOKS[setup], setup)
        axes.set(xlabel="megabytes, down and up, with the base", ylabel=self.axis)
        log_axis(axes)
        axes.set_xlim(left=min(run["megabytes"][1] for of_setup in runs.values() for run in of_setup.values()))
        legend_above(figure, 3)


PAGES = (
    Page(TASKS["shakespeare"], "lora_tables.md", "lora_shakespeare.png", "perplexity of a character", 3),
    Page(TASKS["vit"], "lora_vit_tables.md", "lora_vit.png", "accuracy, %", 1),
)


def main() -> None:
    for page in PAGES:
        restore(page.task.output)
    chosen = {page: runs for page in PAGES if (runs := page.chosen_runs())}
    if not chosen:
        raise SystemExit("No setup has been run with all learning rates yet: call `run.py` first.")
    for page, runs in chosen.items():
        keep(page.task.output)
        text = page.text(runs)
        (DOCS / page.table).write_text(text)
        with printed(DOCS / page.figure, 7.5, 4.5) as figure:
            page.draw(runs, figure)
        print(text)


if __name__ == "__main__":
    main()
