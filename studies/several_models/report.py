"""Writes the results of `run.py`; runs that are not done yet are left out.

    python studies/several_models/report.py

reads ``outputs/several_models`` and ``outputs/several_models_five``, and writes the tables of both to
``docs/tables/several_models.csv`` and ``docs/tables/several_models_five.csv``, what the page shows of the former to
``docs/several_models_tables.md``, and the figures ``docs/several_models.png`` and ``docs/several_models_five.png``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from federations import FEDERATIONS, Federation
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from records import keep, read_runs, restore, write_csv
from run import EVERY, NUM_ROUNDS
from seed_curves import draw_seeds
from setups import SETUPS
from tasks import LOCAL_EPOCHS

from lightning_spectral.report.printed import BASELINE, Look, legend_above, look, printed, round_axis

DOCS = Path("docs")
FULL = "Full participation"
LAST = 3  # evaluations that are averaged for the final accuracy
HEAD = [
    "setup",
    "seeds finished",
    "accuracy, %",
    "relative to full participation",
    "the slides",
    "|H|₁, mean",
    "|H|₁, std over rounds",
    "traffic, MB",
    "of it to measure, MB",
    "store, MB",
]
ON_PAGE = [HEAD[column] for column in (0, 2, 3, 4, 7)]  # of setups that the slides have or that measure nothing
LOOKS = {
    FULL: BASELINE,
    "Random": Look("#999999", "x", 1.6),
    "LVR": look(0),
    "GVR": look(1),
    "GVR*": look(2),
    "FedVARP": look(3),
    "MIFA": look(4),
    "SCAFFOLD": look(5),
}
WITH_MODELS = ("five",)  # federations whose models have different data, so there is a column for each
Run = Mapping[str, Any]


def results(federation: Federation) -> dict[str, dict[int, Run]]:
    """Return all finished runs by setup and seed; the logged values of the models are in ``models``."""
    runs: dict[str, dict[int, Run]] = {name: {} for name in SETUPS}
    for run in read_runs(federation.output):
        run["models"] = {model: run.pop(model) for model in federation.models}
        runs[run["setup"]][run["seed"]] = run
    return runs


def ended(runs: Mapping[int, Run]) -> dict[int, Run]:
    """Return the runs that did not stop early, by seed."""
    return {seed: runs[seed] for seed in sorted(runs) if not runs[seed]["error"]}


def rounds_of(run: Run) -> int:
    """Return the number of rounds that all models finished."""
    return min(max(map(len, columns.values())) for columns in run["models"].values())


def accuracies(run: Run) -> list[list[float]]:
    """Return the accuracy of each model at each evaluation."""
    return [columns["accuracy"] for columns in run["models"].values()]


def curve(run: Run) -> list[float]:
    """Return the mean accuracy of the models at each evaluation."""
    return [mean(values) for values in zip(*accuracies(run), strict=True)]


def final(run: Run) -> float:
    """Return the final accuracy of a finished run: the mean of the last evaluations."""
    return mean(curve(run)[-LAST:])


def step_size(run: Run) -> tuple[float, float]:
    """Return the mean and standard deviation of |H|_1 over rounds, each averaged over models."""
    sizes = [columns["fl/step_size"] for columns in run["models"].values()]
    return mean(map(mean, sizes)), mean(map(stdev, sizes))


def bytes_measuring(run: Run) -> float:
    """Return the bytes sent only for measuring."""
    return sum(sum(columns["fl/bytes_measuring"]) for columns in run["models"].values())


def store_bytes(run: Run) -> float:
    """Return the bytes that the server stores for clients: the maximum of each model, summed over models."""
    return sum(max(columns["fl/store_bytes"], default=0.0) for columns in run["models"].values())


def with_spread(values: Sequence[float], digits: int) -> str:
    """Format the mean and, for two or more values, the sample standard deviation; a dash for none."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}" if values else "-"


def megabytes(sizes: Sequence[float], digits: int = 0) -> str:
    """Format the mean in megabytes; a dash if all sizes are zero."""
    return f"{mean(sizes) / 1e6:.{digits}f}" if any(sizes) else "-"


def row(name: str, runs: Mapping[int, Run], full: Mapping[int, Run], published: float | None) -> list[str]:
    """Return the cells of one setup; all figures are those of the runs that did not stop early.

    Args:
        name: Name of the setup.
        runs: Its runs, by seed.
        full: The runs of full participation, by seed; a run is only compared with the one of its own seed.
        published: The relative accuracy reported in the slides.
    """
    done, reference = ended(runs), ended(full)
    scores = {seed: final(run) for seed, run in done.items()}
    shares = [score / final(reference[seed]) for seed, score in scores.items() if seed in reference]
    relative = with_spread(shares, 3) + (f" (seeds: {len(shares)})" if 0 < len(shares) < len(scores) else "")
    steps = ["always 1", "0"] if SETUPS[name].sampler.normalize else _steps(list(done.values()))
    return [
        name,
        seeds(runs),
        with_spread([100 * score for score in scores.values()], 1),
        relative,
        "-" if published is None else f"{published:.3f}",
        *steps,
        megabytes([run["bytes"] for run in done.values()]),
        megabytes([bytes_measuring(run) for run in done.values()]),
        megabytes([store_bytes(run) for run in done.values()], 1),
    ]


def _steps(runs: Sequence[Run]) -> list[str]:
    return [f"{mean(column):.2f}" for column in zip(*map(step_size, runs), strict=True)] or ["-", "-"]


def by_model(runs: Mapping[int, Run], number: int) -> list[str]:
    """Return the accuracy of each model in per cent: the mean of the runs that did not stop early."""
    per_run = [[100 * mean(values[-LAST:]) for values in accuracies(run)] for run in ended(runs).values()]
    return [f"{mean(column):.1f}" for column in zip(*per_run, strict=True)] or ["-"] * number


def seeds(runs: Mapping[int, Run]) -> str:
    """Format the number of seeds that finished, and after how many rounds the others stopped."""
    stopped = [str(rounds_of(run)) for _, run in sorted(runs.items()) if run["error"]]
    count = str(len(runs) - len(stopped))
    return f"{count}; stopped after {', '.join(stopped)} rounds" if stopped else count


def table(key: str, runs: Mapping[str, Mapping[int, Run]]) -> str:
    """Write a row for each setup with a result, for five models also their accuracies; return what the page shows.

    Args:
        key: Key of the federation.
        runs: Runs of each setup, by seed.
    """
    federation = FEDERATIONS[key]
    number = len(set(chain.from_iterable(runs.values())))
    text = (
        f"{NUM_ROUNDS} rounds of {LOCAL_EPOCHS} local epochs with plain SGD at {learning_rates(federation)}; {number} "
        f"seed{'s' * (number > 1)}; mean of the {len(federation.models)} models and the last {LAST} evaluations. "
        f"{federation.about} [All setups and columns](tables/{federation.figure}.csv)."
    )
    names = federation.models if key in WITH_MODELS else ()
    head = [*HEAD, *(f"{model}, %" for model in names)]
    rows = [
        [
            *row(name, of_setup, runs[FULL], SETUPS[name].published.get(key)),
            *(by_model(of_setup, len(names)) if names else ()),
        ]
        for name, of_setup in runs.items()
        if of_setup
    ]
    write_csv(federation.figure, head, rows)
    columns = [head.index(name) for name in ON_PAGE]
    compared = [row for row in rows if SETUPS[row[0]].published or "last known" in row[0]]
    shown = [[row[column] for column in columns] for row in (head, ["---"] * len(head), *compared)]
    return f"{text}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in shown)


def learning_rates(federation: Federation) -> str:
    """Format the common learning rate of all models, or the rate of each."""
    rates = [f"{rate:g}" for rate in federation.rates.values()]
    return f"a learning rate of {rates[0]}" if len(set(rates)) == 1 else f"learning rates of {', '.join(rates)}"


def draw_accuracy(axes: Axes, name: str, runs: Iterable[Run]) -> None:
    """Draw the mean over seeds and a band from the worst to the best, over the evaluations that all runs have."""
    curves = [[100 * value for value in curve(run)] for run in runs]
    shared = min(map(len, curves), default=0)
    rounds = [EVERY * (i + 1) for i in range(shared)]
    draw_seeds(axes, rounds, [values[:shared] for values in curves], LOOKS[name], name)


def draw(runs: Mapping[str, Mapping[int, Run]], figure: Figure) -> None:
    """Draw accuracy against rounds; how unsteady the steps are is in the table."""
    axes = figure.subplots()
    for name in LOOKS:
        draw_accuracy(axes, name, ended(runs[name]).values())
    axes.set_ylabel("test accuracy, mean of the models, %")
    round_axis(axes)
    legend_above(figure, len(LOOKS))


def main() -> None:
    texts = []
    for key, federation in FEDERATIONS.items():
        restore(federation.output)
        runs = results(federation)
        if any(runs.values()):
            keep(federation.output)
            texts.append(table(key, runs))  # which writes a file for each
            with printed(DOCS / f"{federation.figure}.png", 4.8, 4.4) as figure:
                draw(runs, figure)
    text = "\n".join(texts[:1])  # of three models; what five add is said on the page
    (DOCS / "several_models_tables.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
