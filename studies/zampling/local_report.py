"""Writes the results of the local runs beside the paper's numbers.

    python studies/zampling/local_report.py

reads ``outputs/zampling_local`` and writes ``docs/tables/zampling_local_*.csv`` and ``docs/zampling_figure3.svg``. All
runs are also stored in ``docs/runs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from local import OUTPUT, TAUS
from matplotlib.axes import Axes
from records import keep, read_runs, write_csv
from tables import Rows, Run, per_cent

from lightning_spectral.report.printed import legend_above, look, printed

DOCS = Path("docs")
TABLE_2 = {  # mean and standard deviation of sampled accuracy, for compressions of 1, 2, 4, 8, 16 and 32
    100: ("85.60±2.16", "82.63±2.43", "76.83±2.93", "70.33±2.98", "62.78±3.29", "49.43±3.32"),
    50: ("86.77±1.76", "81.83±2.30", "79.28±2.76", "71.75±2.94", "59.12±3.71", "48.76±3.59"),
    10: ("85.29±2.20", "81.99±2.50", "78.70±2.56", "72.31±2.90", "64.43±2.65", "49.99±2.99"),
    5: ("83.37±2.42", "78.52±3.40", "78.73±2.81", "71.80±3.17", "62.85±3.02", "47.90±3.33"),
    1: ("76.35±3.21", "71.37±4.25", "70.05±3.55", "60.60±3.49", "55.56±3.54", "47.48±3.00"),
}
TABLE_4 = {  # tau: accuracy and sensitivity after perturbation, of regular and of sampled training
    0.01: ("82.85, 0.13", "90.29, 0.0035"),
    0.1: ("81.43, 0.14", "89.67, 0.0030"),
    0.2: ("82.42, 0.13", "89.64, 0.0022"),
    0.5: ("20.07, 0.78", "78.80, 0.17"),
}


def results(experiment: str, **wanted: Any) -> list[Run]:
    """Return the runs of an experiment that have all the given values."""
    runs = read_runs(OUTPUT, f"{experiment}_*")
    return [run for run in runs if all(run[name] == value for name, value in wanted.items())]


def levels(runs: Sequence[Run], name: str) -> list[Any]:
    """Return the values of a field in ascending order."""
    return sorted({run[name] for run in runs})


def mean_sampled(runs: Sequence[Run]) -> list[float]:
    return [mean(run["sampled"]) for run in runs]


def figure3_table() -> Rows:
    """Return a table of the mean sampled accuracy and that of the expected network, beside Table 2."""
    runs = results("figure3")
    rows = []
    for degree in levels(runs, "degree"):
        for compression in levels(runs, "compression"):
            chosen = [run for run in runs if (run["degree"], run["compression"]) == (degree, compression)]
            if not chosen:
                continue
            printed = dict(zip((1, 2, 4, 8, 16, 32), TABLE_2[degree], strict=True)).get(compression, "")
            within = mean(stdev(run["sampled"]) for run in chosen)
            rows.append(
                [
                    str(degree),
                    str(compression),
                    per_cent(mean_sampled(chosen)),
                    f"{100 * within:.1f}",
                    per_cent([run["expected"] for run in chosen]),
                    printed,
                ]
            )
    head = ["d", "m/n", "mean of sampled", "spread of one run's samples", "expected network", "Table 2, sampled"]
    return head, rows


def figure3(axes: Axes) -> None:
    """Draw accuracy against compression, with a line for each degree; dashed for the expected network."""
    runs = results("figure3")
    for index, degree in enumerate(levels(runs, "degree")):
        chosen = [run for run in runs if run["degree"] == degree]
        compressions, (colour, marker, _) = levels(chosen, "compression"), look(index)
        groups = [[run for run in chosen if run["compression"] == c] for c in compressions]
        means = [[100 * value for value in mean_sampled(group)] for group in groups]
        spread = [stdev(values) if len(values) > 1 else 0.0 for values in means]
        style = {"color": colour, "marker": marker}
        axes.errorbar(compressions, [mean(v) for v in means], spread, label=f"d = {degree}", capsize=2, **style)
        expected = [100 * mean(run["expected"] for run in group) for group in groups]
        axes.plot(compressions, expected, linestyle="--", linewidth=0.8, alpha=0.7, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(found := levels(runs, "compression"), [f"{compression:g}" for compression in found])
    axes.set(xlabel="compression m/n", ylabel="test accuracy, %")
    axes.set_title("784-20-20-10 on MNIST: mean of sampled networks; dashed, the expected network")


def zhou_table() -> Rows:
    """Return a table of the best sampled networks and of supermasks."""
    runs = results("zhou")
    rows = []
    for method, degree, lr in sorted({(r["method"], r["degree"] or 0, r["lr"]) for r in runs}):
        chosen = [r for r in runs if (r["method"], r["degree"] or 0, r["lr"]) == (method, degree, lr)]
        name = "supermask" if method == "supermask" else f"Zampling, d = {degree}"
        best = per_cent([max(run["sampled"]) for run in chosen])
        rows.append(
            [name, f"{lr:g}", best, per_cent(mean_sampled(chosen)), per_cent([run["expected"] for run in chosen])]
        )
    return ["method", "learning rate", "best of the sampled", "mean of the sampled", "expected network"], rows


def sensitivity_table() -> Rows:
    """Return a table of accuracy after perturbation and its mean change, relative and per unit of the noise's norm."""
    runs = results("sensitivity")
    rows = []
    for where in ("inside", "outside"):
        for tau in TAUS:
            for method in ("continuous", "sampled"):
                found = [
                    row
                    for run in runs
                    if run["method"] == method
                    for row in run["perturbed"]
                    if (row["where"], row["tau"]) == (where, tau)
                ]
                after = [value for row in found for value in row["after"]]
                change = mean(abs(row["before"] - value) / row["before"] for row in found for value in row["after"])
                deviations = [
                    abs(row["before"] - value) / norm
                    for row in found
                    for value, norm in zip(row["after"], row["norms"], strict=True)
                    if norm
                ]
                printed = TABLE_4[tau][("continuous", "sampled").index(method)] if tau in TABLE_4 else ""
                rows.append(
                    [
                        where,
                        f"{tau:g}",
                        "regular" if method == "continuous" else "by sampling",
                        per_cent([row["share"] for row in found][:1]),
                        per_cent([row["before"] for row in found]),
                        per_cent(after),
                        f"{change:.2g}",
                        f"{mean(deviations):.1g}" if deviations else "",
                        printed,
                    ]
                )
    head = ["perturbed", "τ", "training", "share of p, %", "accuracy before", "accuracy after", "sensitivity"]
    return [*head, "deviation", "Table 4: accuracy, sensitivity"], rows


def integrality_table() -> Rows:
    """Return a table of expected, rounded and sampled networks for each start."""
    runs = results("integrality")
    rows = []
    for method, beta in sorted({(run["method"], run["beta"]) for run in runs}):
        chosen = [run for run in runs if (run["method"], run["beta"]) == (method, beta)]
        gaps = [run["expected"] - mean(run["sampled"]) for run in chosen]
        rows.append(
            [
                "by sampling" if method == "sampled" else "regular",
                f"{beta:g}",
                per_cent([run["expected"] for run in chosen]),
                per_cent(mean_sampled(chosen)),
                per_cent([run["rounded"] for run in chosen]),
                per_cent(gaps),
                f"{mean(run['uncertainty'] for run in chosen):.3f}",
            ]
        )
    head = ["training", "Beta(a, a), a", "expected network", "mean of sampled", "rounded", "integrality gap"]
    return [*head, "mean p(1 - p) at the end"], rows


def main() -> None:
    keep(OUTPUT)
    with printed(DOCS / "zampling_figure3.svg", 6.4, 4.0) as figure:
        figure3(figure.subplots())
        legend_above(figure, 5)
    write_csv("zampling_local_figure3", *figure3_table())
    write_csv("zampling_local_zhou", *zhou_table())
    write_csv("zampling_local_sensitivity", *sensitivity_table())
    write_csv("zampling_local_integrality", *integrality_table())


if __name__ == "__main__":
    main()
