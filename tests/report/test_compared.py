"""How runs are compared: order and colours, labels, costs of a target, equal megabytes, lengths, and remarks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import made_run, rounds, write_run

from lightning_spectral.report.compared import (
    Group,
    at_megabytes,
    cost_to_reach,
    equal_cost_table,
    group_end,
    group_runs,
    groups_table,
    in_order,
    last_common_round,
    on_curves,
    on_lengths,
    target_table,
)
from lightning_spectral.report.measures import choose_metric
from lightning_spectral.report.printed import GREY
from lightning_spectral.report.runs import LoggedRun, read_run, read_runs
from lightning_spectral.report.sections import look_of

pytest.importorskip("matplotlib", reason="matplotlib is in the `report` extra")


def run(values: Sequence[float], sent: float = 1.0, name: str = "run", every: int = 1, **config: Any) -> LoggedRun:
    """A run that sends so many megabytes a round, and is evaluated every few rounds; NaN leaves one out."""
    rows: list[dict[str, float]] = []
    for index, value in enumerate(values):
        rows.append({"fl/round": index, "fl/bytes_up": sent * 1e6, "fl/virtual_seconds": 3})
        if (index + 1) % every == 0:
            rows.append({"fl/round": index, "val_acc": value})
    return made_run(name, config, rows)


LORA, ZAMPLING, FEDAVG = ({"name": name} for name in ("LoRA", "Zampling", "FedAvg"))


def grouped(*runs: LoggedRun) -> list[Group]:
    return group_runs(runs)[0]


def test_fedavg_is_first_and_grey_and_the_others_are_ordered_by_what_they_sent() -> None:
    dear, cheap = run([0.5], 5.0, algorithm=LORA), run([0.6], 2.0, algorithm=ZAMPLING)
    baseline = run([0.7], 9.0, algorithm=FEDAVG)
    ordered = in_order(grouped(dear, cheap, baseline), "val_acc")
    assert [group.label for group in ordered] == ["FedAvg", "Zampling", "LoRA"]
    assert [look_of(group).colour == GREY for group in ordered] == [True, False, False]
    assert len({look_of(group) for group in ordered}) == 3
    alone = in_order(grouped(cheap, baseline), "val_acc")
    assert look_of(alone[0]) == look_of(ordered[0])


def test_several_models_are_a_baseline_if_all_are_trained_by_fedavg() -> None:
    def of(second: str) -> LoggedRun:
        federation = {"models": {"a": {"algorithm": FEDAVG}, "b": {"algorithm": {"name": second}}}}
        return run([0.5], federation=federation)

    assert [group.is_baseline for group in grouped(of("FedAvg"), of("LoRA"))] == [True, False]


def test_the_cost_of_a_target_is_what_was_spent_by_the_first_evaluation_that_reaches_it() -> None:
    values = [0.1, 0.5, 0.3, 0.6, 0.5, 0.9]
    every, some = run(values, 2.0), run(values, 2.0, every=2)
    for target in (0.05, 0.5, 0.55, 0.9):
        number = next(index for index, value in enumerate(values) if value >= target) + 1
        assert cost_to_reach(every, "val_acc", target, False) == (number, 2.0 * number, 3.0 * number)
    assert cost_to_reach(some, "val_acc", 0.05, False) == (2, 4.0, 6.0)
    assert cost_to_reach(every, "val_acc", 0.91, False) is None
    assert cost_to_reach(every, "val_acc", 0.1, True) == (1, 2.0, 3.0)


def test_the_table_of_a_target_counts_the_runs_that_reach_it_and_lacks_costs_that_nobody_logged() -> None:
    runs = [run([0.1, 0.8], seed=0, lr=1), run([0.8, 0.8], seed=1, lr=1), run([0.1, 0.1], seed=0, lr=2)]
    table = target_table(grouped(*runs), "val_acc", 0.8, minimise=False)
    assert table.columns == ("group", "runs that reach it", "rounds", "megabytes", "virtual seconds")
    assert table.rows[0] == ("lr=1", "2 of 2", "1.5 ± 0.71", "1.5 ± 0.71", "4.5 ± 2.1")
    assert table.rows[1] == ("lr=2", "0 of 1", "", "", "")
    bare = [made_run("r", {}, [{"fl/round": 0, "val_acc": 0.9}])]
    assert target_table(grouped(*bare), "val_acc", 0.8, False).columns == ("group", "runs that reach it", "rounds")


def test_at_equal_megabytes_the_last_evaluation_within_the_budget_counts() -> None:
    values = [0.1, 0.2, 0.3, 0.4]
    one = run(values, 2.0, every=2)
    for budget in np.linspace(0.0, 9.0, 37):
        within = [value for index, value in enumerate(values) if index % 2 and 2.0 * (index + 1) <= budget]
        np.testing.assert_equal(at_megabytes(one, "val_acc", budget), within[-1] if within else math.nan)
    table = equal_cost_table(grouped(run([0.1] * 3 + [0.4], 2.0, lr=1), run([0.5] * 40, 1.0, lr=2)), "val_acc")
    assert table is not None
    assert table.columns == ("group", "0.8 MB", "2 MB", "4 MB", "8 MB")
    assert table.rows == (("lr=1", "", "0.1", "0.1", "0.4"), ("lr=2", "", "0.5", "0.5", "0.5"))
    assert equal_cost_table(grouped(made_run("r", {}, [{"fl/round": 0, "val_acc": 0.9}])), "val_acc") is None


def test_repetitions_are_compared_where_the_shortest_ends_and_groups_at_a_common_round_too() -> None:
    long, short = run([0.1, 0.2, 0.3, 0.4], seed=0, lr=1), run([0.3, 0.4], seed=1, lr=1)
    groups = grouped(long, short, run([0.5, 0.6, 0.7], lr=2))
    assert last_common_round(groups[0].runs, "val_acc") == 1
    np.testing.assert_allclose(group_end(groups[0], "val_acc"), [[2, 0.2], [2, 0.4]])
    table = groups_table(groups, "val_acc")
    assert table.columns == ("group", "runs", "val_acc", "rounds", "megabytes", "at round 2")
    assert table.rows == (("lr=1", 2, "0.3 ± 0.14", 2, "2", "0.3 ± 0.14"), ("lr=2", 1, "0.7", 3, "3", "0.6"))
    assert on_lengths(groups, "val_acc") == (
        "Runs were last evaluated after 2 to 4 rounds: some may be unfinished. Repetitions are compared where the "
        "shortest of them ends: lr=1. The table also compares all groups at round 2, the last that all runs have."
    )
    assert on_lengths(grouped(long, run([0.0] * 4, lr=2)), "val_acc") == ""


@pytest.mark.parametrize(
    ("values", "flat"),
    [
        ([0.10, 0.11, 0.10, 0.112], True),
        ([0.10, 0.11, 0.10, 0.14], False),
        ([0.10, 0.10], False),  # too few to tell
        ([0.95, 0.955, 0.96], True),
    ],
)
def test_curves_that_hardly_move_are_named_with_their_range_and_what_to_do(values: list[float], flat: bool) -> None:
    remark = on_curves(
        grouped(run(values, algorithm=LORA), run([0.1, 0.5, 0.9], algorithm=ZAMPLING)),
        "val_acc",
    )
    assert ("Curves that hardly move: LoRA (" in remark) == ("has been learned yet" in remark) == flat
    assert "Zampling" not in remark
    assert "FedAvg" not in remark


def test_if_fedavg_is_flat_too_sharding_is_not_the_reason_and_a_loss_has_the_scale_of_its_values() -> None:
    assert "so sharding is not the reason" in on_curves(grouped(run([0.1] * 3, algorithm=FEDAVG)), "val_acc")

    def loss(*values: float) -> list[Group]:
        rows = [{"fl/round": index, "val_loss": value} for index, value in enumerate(values)]
        return grouped(made_run("r", {}, rows))

    assert "hardly move: r (2.3 to 2.31)" in on_curves(loss(2.31, 2.3, 2.3), "val_loss")
    assert on_curves(loss(0.03, 0.02, 0.01), "val_loss") == ""


def test_a_curve_that_ends_in_nan_has_diverged() -> None:
    remark = on_curves(grouped(run([0.1, 0.2, math.nan], lr=1), run([0.1, 0.2, 0.3], lr=2)), "val_acc")
    assert remark.startswith("Curves that end in no finite number: lr=1. Training diverged: lower")


def test_runs_with_a_label_are_one_group_whatever_their_settings(tmp_path: Path) -> None:
    for name, config in (("a", {"lr": 1}), ("b", {"lr": 2}), ("c", {"lr": 3}), ("d=e", {"lr": 4})):
        write_run(tmp_path / name, rounds([0.5, 0.6]), config)
    runs, _ = read_runs(
        Path(f"{text.replace('~', str(tmp_path))}") for text in ("ours=~/a", "ours=~/b", "~/c", "~/d=e")
    )
    assert [(group.label, len(group.runs)) for group in grouped(*runs)] == [("ours", 2), ("lr=3", 1), ("lr=4", 1)]
    (alone,) = grouped(*read_runs([Path(f"fed avg={tmp_path / 'a'}")])[0])
    assert alone.label == "fed avg"


def test_runs_of_a_sweep_are_grouped_by_what_it_varied_alone(tmp_path: Path) -> None:
    def swept(width: int, seed: int) -> LoggedRun:
        varied = {"width": str(width), "seed": seed}
        return run([0.5], name=f"{width}{seed}", sweep=varied, federation={"seed": seed, "algorithm": "FedAvg"})

    groups, names = group_runs([swept(4, 0), swept(8, 0), swept(4, 1), swept(8, 1)])
    assert [(group.label, len(group.runs)) for group in groups] == [("width=4", 2), ("width=8", 2)]
    assert names == ["sweep/width"]


def with_a_test(values: Sequence[float]) -> list[dict[str, float]]:
    """Rounds, then what `Trainer.test` logs."""
    return [*rounds(values), {"fl/round": len(values) - 1, "test_acc": 0.95, "test_loss": 0.1}]


def test_validation_is_reported_before_a_test_which_belongs_to_the_last_round(tmp_path: Path) -> None:
    read = read_run(write_run(tmp_path / "run", with_a_test([0.5, 0.6, 0.7])) / "rounds.jsonl")
    assert choose_metric([read])[0] == "val_acc"
    assert [row["fl/round"] for row in read.rows] == [0, 1, 2]
    assert read.rows[-1]["test_acc"] == 0.95
    assert groups_table(grouped(read), "test_acc").rows == ((read.name, 1, "0.95", 3, "9"),)


def test_a_run_that_was_only_tested_is_left_out_beside_others_and_reported_alone(tmp_path: Path) -> None:
    from lightning_spectral.report import main

    write_run(tmp_path / "runs/trained", with_a_test([0.5, 0.6, 0.7]), {"lr": 1})
    only = write_run(tmp_path / "runs/only_tested", with_a_test([0.5])[-1:], {"lr": 1})
    page = tmp_path / "r.html"
    assert main([str(tmp_path / "runs"), "-o", str(page)]) == 0
    text = page.read_text()
    assert "<title>val_acc of 1 federated run</title>" in text
    assert (
        f"Left out: {only / 'rounds.jsonl'} has only <code>test_acc</code>, <code>test_loss</code>, of a test" in text
    )
    assert main([str(only), "-o", str(page)]) == 0
    assert "<title>test_acc of 1 federated run</title>" in page.read_text()


def test_the_page_has_the_table_of_groups_open_and_the_cost_of_a_target(tmp_path: Path) -> None:
    from lightning_spectral.report import main

    for name, accuracies in (("FedAvg", [0.5, 0.8]), ("LoRA", [0.6, 0.7])):
        write_run(tmp_path / name, rounds(accuracies), {"algorithm": {"name": name}})
    page = tmp_path / "r.html"
    assert main([str(tmp_path / "LoRA"), str(tmp_path / "FedAvg"), "--target", "0.65", "-o", str(page)]) == 0
    text = page.read_text()
    opened = [part.partition("</summary>")[0] for part in text.split("<details open><summary>")[1:]]
    assert opened == ["Groups", "Until val_acc is at least 0.65", "val_acc for the same megabytes"]
    assert "<td>FedAvg</td><td>1 of 1</td><td class=number>2</td><td class=number>6</td>" in text
    assert text.index("<td>FedAvg</td>") < text.index("<td>LoRA</td>")
    folded = [part.partition("</summary>")[0] for part in text.split("<details><summary>")[1:]]
    assert "All runs" in folded


def test_a_legend_of_long_names_fits_into_its_figure() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from lightning_spectral.report.printed import PRINTED
    from lightning_spectral.report.sections import Contents, pareto_section

    ratios = [f"{{0.{index}: 0.6, 0.{index + 1}: 0.25, 1.0: 0.15}}" for index in range(1, 6)]
    groups = grouped(*(run([0.1, 0.5], keep_ratio=ratio, strategy="EffectiveCohort") for ratio in ratios))
    picture = pareto_section(Contents(groups, "val_acc", False)).picture
    assert picture is not None
    for width in ("wide", "narrow"):
        figure = picture.drawn(width, PRINTED).figure
        FigureCanvasAgg(figure).draw()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert min(axes.bbox.height for axes in figure.axes) > 0.45 * figure.bbox.height
