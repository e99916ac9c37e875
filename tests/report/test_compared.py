"""How runs are measured, grouped and compared: order and colours, labels, costs of a target, lengths, and remarks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import made_run, rounds, write_run

import lightning_spectral as ls
from lightning_spectral.errors import ReportError
from lightning_spectral.plugin.settings import as_config
from lightning_spectral.report import compared, main, measures
from lightning_spectral.report.compared import Group
from lightning_spectral.report.measures import Curve
from lightning_spectral.report.printed import GREY
from lightning_spectral.report.runs import LoggedRun, read_run, read_runs
from lightning_spectral.report.sections import Contents, all_sections, look_of, pareto_section

pytest.importorskip("matplotlib", reason="matplotlib is in the `report` extra")


def run(values: Sequence[float], sent: float = 1.0, name: str = "run", every: int = 1, **config: Any) -> LoggedRun:
    """A run that sends so many megabytes a round, and is evaluated every few rounds; NaN leaves one out."""
    rows: list[dict[str, float]] = []
    for index, value in enumerate(values):
        rows.append({"fl/round": index, "fl/bytes_up": sent * 1e6, "fl/virtual_seconds": 3})
        if (index + 1) % every == 0:
            rows.append({"fl/round": index, "val_acc": value})
    return made_run(name, config, rows)


def made(config: Any = None, *logged: Any, name: str = "run") -> LoggedRun:
    return made_run(name, config or {}, logged or [{"fl/round": 0, "val_acc": 0.5}])


LORA, ZAMPLING, FEDAVG = ({"name": name} for name in ("LoRA", "Zampling", "FedAvg"))


def grouped(*runs: LoggedRun) -> list[Group]:
    return compared.group_runs(runs)[0]


def test_fedavg_is_first_and_grey_and_the_others_are_ordered_by_what_they_sent() -> None:
    dear, cheap = run([0.5], 5.0, algorithm=LORA), run([0.6], 2.0, algorithm=ZAMPLING)
    baseline = run([0.7], 9.0, algorithm=FEDAVG)
    ordered = compared.in_order(grouped(dear, cheap, baseline), "val_acc")
    assert [group.label for group in ordered] == ["FedAvg", "Zampling", "LoRA"]
    assert [look_of(group).colour == GREY for group in ordered] == [True, False, False]
    assert len({look_of(group) for group in ordered}) == 3
    assert look_of(compared.in_order(grouped(cheap, baseline), "val_acc")[0]) == look_of(ordered[0])


def test_several_models_are_a_baseline_if_all_are_trained_by_fedavg() -> None:
    def of(second: str) -> LoggedRun:
        return run([0.5], federation={"models": {"a": {"algorithm": FEDAVG}, "b": {"algorithm": {"name": second}}}})

    assert [group.is_baseline for group in grouped(of("FedAvg"), of("LoRA"))] == [True, False]


def test_the_cost_of_a_target_is_what_was_spent_by_the_first_evaluation_that_reaches_it() -> None:
    values = [0.1, 0.5, 0.3, 0.6, 0.5, 0.9]
    every, some = run(values, 2.0), run(values, 2.0, every=2)
    for target in (0.05, 0.5, 0.55, 0.9):
        number = next(index for index, value in enumerate(values) if value >= target) + 1
        assert compared.cost_to_reach(every, "val_acc", target, False) == (number, 2.0 * number, 3.0 * number)
    assert compared.cost_to_reach(some, "val_acc", 0.05, False) == (2, 4.0, 6.0)
    assert compared.cost_to_reach(every, "val_acc", 0.91, False) is None
    assert compared.cost_to_reach(every, "val_acc", 0.1, True) == (1, 2.0, 3.0)


def test_the_table_of_a_target_counts_the_runs_that_reach_it_and_lacks_costs_that_nobody_logged() -> None:
    runs = [run([0.1, 0.8], seed=0, lr=1), run([0.8, 0.8], seed=1, lr=1), run([0.1, 0.1], seed=0, lr=2)]
    table = compared.target_table(grouped(*runs), "val_acc", 0.8, minimise=False)
    assert table.columns == ("group", "runs that reach it", "rounds", "megabytes", "virtual seconds")
    assert table.rows[0] == ("lr=1", "2 of 2", "1.5 ± 0.71", "1.5 ± 0.71", "4.5 ± 2.1")
    assert table.rows[1] == ("lr=2", "0 of 1", "", "", "")
    bare = [made_run("r", {}, [{"fl/round": 0, "val_acc": 0.9}])]
    assert compared.target_table(grouped(*bare), "val_acc", 0.8, False).columns == table.columns[:3]


def test_at_equal_megabytes_the_last_evaluation_within_the_budget_counts() -> None:
    values = [0.1, 0.2, 0.3, 0.4]
    one = run(values, 2.0, every=2)
    for budget in np.linspace(0.0, 9.0, 37):
        within = [value for index, value in enumerate(values) if index % 2 and 2.0 * (index + 1) <= budget]
        np.testing.assert_equal(compared.at_megabytes(one, "val_acc", budget), within[-1] if within else math.nan)
    table = compared.equal_cost_table(grouped(run([0.1] * 3 + [0.4], 2.0, lr=1), run([0.5] * 40, 1.0, lr=2)), "val_acc")
    assert table is not None
    assert table.columns == ("group", "0.8 MB", "2 MB", "4 MB", "8 MB")
    assert table.rows == (("lr=1", "", "0.1", "0.1", "0.4"), ("lr=2", "", "0.5", "0.5", "0.5"))
    assert compared.equal_cost_table(grouped(made_run("r", {}, [{"fl/round": 0, "val_acc": 0.9}])), "val_acc") is None


def test_repetitions_are_compared_where_the_shortest_ends_and_groups_at_a_common_round_too() -> None:
    long, short = run([0.1, 0.2, 0.3, 0.4], seed=0, lr=1), run([0.3, 0.4], seed=1, lr=1)
    groups = grouped(long, short, run([0.5, 0.6, 0.7], lr=2))
    assert compared.last_common_round(groups[0].runs, "val_acc") == 1
    np.testing.assert_allclose(compared.group_end(groups[0], "val_acc"), [[2, 0.15], [2, 0.35]])
    table = compared.groups_table(groups, "val_acc", minimise=False)
    assert table.columns == ("group", "runs", "val_acc, last 5", "best", "rounds", "megabytes", "at round 2")
    first = ("lr=1", 2, "0.25 ± 0.14", "0.3 ± 0.14", 2, "2", "0.25 ± 0.14")
    assert table.rows == (first, ("lr=2", 1, "0.6", "0.7", 3, "3", "0.55"))
    assert compared.on_lengths(groups, "val_acc") == (
        "Runs were last evaluated after 2 to 4 rounds: some may be unfinished. Repetitions are compared where the "
        "shortest of them ends: lr=1. The table also compares all groups at round 2, the last that all runs have."
    )
    assert compared.on_lengths(grouped(long, run([0.0] * 4, lr=2)), "val_acc") == ""


def test_groups_are_ranked_by_means_of_five_evaluations_with_the_best_beside_them() -> None:
    """The first ends higher by chance; the second is better in all but its last evaluation."""
    lucky, steady = run([0.9, 0.1, 0.1, 0.1, 0.1, 0.8], lr=1), run([0.2, 0.7, 0.7, 0.7, 0.7, 0.3], lr=2)
    rows = compared.groups_table(grouped(lucky, steady), "val_acc", minimise=False).rows
    assert [row[2:4] for row in rows] == [("0.24", "0.9"), ("0.62", "0.7")]
    rows = compared.groups_table(grouped(lucky, steady), "val_acc", minimise=True).rows
    assert [row[3] for row in rows] == ["0.1", "0.2"]


def test_an_order_that_may_be_chance_is_named() -> None:
    """Means and deviations: .15 and .07, .2 and .14, .9 and .07; the first two overlap."""
    repeated = [run([value], lr=lr) for lr, pair in enumerate([(0.1, 0.2), (0.1, 0.3), (0.85, 0.95)]) for value in pair]
    assert compared.on_repetitions(grouped(*repeated), "val_acc") == (
        "Their order is not settled, as their standard deviations overlap: lr=1 and lr=0."
    )
    assert compared.on_repetitions(grouped(*repeated[2:]), "val_acc") == ""
    alone = run([0.5], lr=7)
    assert compared.on_repetitions(grouped(*repeated[2:], alone), "val_acc").startswith("A single run: lr=7. Other")
    assert compared.on_repetitions(grouped(alone), "val_acc") == "", "there is no order"


@pytest.mark.parametrize("times", [1.0, 1.001, 2.0])
def test_nothing_is_drawn_against_megabytes_that_are_equal(times: float) -> None:
    groups = grouped(run([0.1, 0.5], lr=1), run([0.1, 0.6], times, lr=2))
    first, _, curves, *_ = all_sections(Contents(groups, "val_acc", False))
    differ = times == 2.0
    assert ("megabytes" in curves.title, "megabytes" in first.title, first.picture is not None) == (differ,) * 3
    assert ("All groups sent the same" in first.remark) == (not differ)
    assert "means of the last 5 evaluations" in first.lead
    assert first.remark.startswith("A single run: every group.")


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
    groups = grouped(run(values, algorithm=LORA), run([0.1, 0.5, 0.9], algorithm=ZAMPLING))
    remark = compared.on_curves(groups, "val_acc")
    assert ("Curves that hardly move: LoRA (" in remark) == ("has been learned yet" in remark) == flat
    assert "Zampling" not in remark
    assert "FedAvg" not in remark


def test_if_fedavg_is_flat_too_sharding_is_not_the_reason_and_a_loss_has_the_scale_of_its_values() -> None:
    assert "so sharding is not the reason" in compared.on_curves(grouped(run([0.1] * 3, algorithm=FEDAVG)), "val_acc")

    def loss(*values: float) -> list[Group]:
        rows = [{"fl/round": index, "val_loss": value} for index, value in enumerate(values)]
        return grouped(made_run("r", {}, rows))

    assert "hardly move: r (2.3 to 2.31)" in compared.on_curves(loss(2.31, 2.3, 2.3), "val_loss")
    assert compared.on_curves(loss(0.03, 0.02, 0.01), "val_loss") == ""


def test_a_value_that_makes_the_axis_long_is_named() -> None:
    usual = [run([2.0 - 0.01 * index for index in range(30)], lr=lr) for lr in (1, 2)]
    far = run([5000.0, *(1.9 for _ in range(29))], lr=3)
    said = "The axis goes from 1.71 to 5e+03 because of lr=3; nine in ten values lie between "
    assert said in compared.on_curves(grouped(*usual, far), "val_acc")
    assert "The axis" not in compared.on_curves(grouped(*usual), "val_acc")


def test_a_mean_is_over_the_repetitions_that_are_known_and_says_how_many_they_are() -> None:
    logged = [{"fl/round": i, "fl/bytes_up": 1e6, **({"val_acc": 0.5} if i else {})} for i in range(4)]
    late = made({"lr": 1, "seed": 1}, *logged)
    groups = grouped(run([0.1, 0.2, 0.3, 0.4], 1.0, lr=1), late, run([0.5] * 4, 1.0, lr=2))
    table = compared.equal_cost_table(groups, "val_acc")
    assert table is not None
    assert table.rows[0][2] == "0.1 (1 of 2)"


def test_a_curve_that_ends_in_nan_has_diverged() -> None:
    remark = compared.on_curves(grouped(run([0.1, 0.2, math.nan], lr=1), run([0.1, 0.2, 0.3], lr=2)), "val_acc")
    assert remark.startswith("Curves that end in no finite number: lr=1. Training diverged: lower")


def test_runs_with_a_label_are_one_group_whatever_their_settings(tmp_path: Path) -> None:
    for name, config in (("a", {"lr": 1}), ("b", {"lr": 2}), ("c", {"lr": 3}), ("d=e", {"lr": 4})):
        write_run(tmp_path / name, rounds([0.5, 0.6]), config)
    runs, _ = read_runs(Path(text.replace("~", str(tmp_path))) for text in ("ours=~/a", "ours=~/b", "~/c", "~/d=e"))
    assert [(group.label, len(group.runs)) for group in grouped(*runs)] == [("ours", 2), ("lr=3", 1), ("lr=4", 1)]
    (alone,) = grouped(*read_runs([Path(f"fed avg={tmp_path / 'a'}")])[0])
    assert alone.label == "fed avg"


def test_runs_of_a_sweep_are_grouped_by_what_it_varied_alone() -> None:
    def swept(width: int, seed: int) -> LoggedRun:
        varied = {"width": str(width), "seed": seed}
        return run([0.5], name=f"{width}{seed}", sweep=varied, federation={"seed": seed, "algorithm": "FedAvg"})

    groups, names = compared.group_runs([swept(4, 0), swept(8, 0), swept(4, 1), swept(8, 1)])
    assert [(group.label, len(group.runs)) for group in groups] == [("width=4", 2), ("width=8", 2)]
    assert names == ["sweep/width"]


def with_a_test(values: Sequence[float]) -> list[dict[str, float]]:
    """Rounds, then what `Trainer.test` logs."""
    return [*rounds(values), {"fl/round": len(values) - 1, "test_acc": 0.95, "test_loss": 0.1}]


def test_validation_is_reported_before_a_test_which_belongs_to_the_last_round(tmp_path: Path) -> None:
    read = read_run(write_run(tmp_path / "run", with_a_test([0.5, 0.6, 0.7])) / "rounds.jsonl")
    assert measures.choose_metric([read])[0] == "val_acc"
    assert [row["fl/round"] for row in read.rows] == [0, 1, 2]
    assert read.rows[-1]["test_acc"] == 0.95
    assert compared.groups_table(grouped(read), "test_acc", False).rows == ((read.name, 1, "0.95", "0.95", 3, "9"),)


def test_a_run_that_was_only_tested_is_left_out_beside_others_and_reported_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/trained", with_a_test([0.5, 0.6, 0.7]), {"lr": 1})
    only = write_run(tmp_path / "runs/only_tested", with_a_test([0.5])[-1:], {"lr": 1})
    page = tmp_path / "r.html"
    assert main([str(tmp_path / "runs"), "-o", str(page)]) == 0
    text = page.read_text()
    assert "<title>val_acc of 1 federated run</title>" in text
    why = "has only <code>test_acc</code>, <code>test_loss</code>, of a test"
    assert f"Left out: {only / 'rounds.jsonl'} {why}" in text
    assert main([str(only), "-o", str(page)]) == 0
    assert "<title>test_acc of 1 federated run</title>" in page.read_text()


def test_the_page_has_the_table_of_groups_open_and_the_cost_of_a_target(tmp_path: Path) -> None:
    for name, accuracies in (("FedAvg", [0.5, 0.8]), ("LoRA", [0.6, 0.7])):
        write_run(tmp_path / name, rounds(accuracies), {"algorithm": {"name": name}})
    page = tmp_path / "r.html"
    assert main([str(tmp_path / "LoRA"), str(tmp_path / "FedAvg"), "--target", "0.65", "-o", str(page)]) == 0
    text = page.read_text()
    opened = [part.partition("</summary>")[0] for part in text.split("<details open><summary>")[1:]]
    assert opened == [
        "Groups",
        "Until val_acc is at least 0.65",
        "val_acc for the same megabytes, last evaluation",
    ]
    assert "<td>FedAvg</td><td>1 of 1</td><td class=number>2</td><td class=number>6</td>" in text
    assert text.index("<td>FedAvg</td>") < text.index("<td>LoRA</td>")
    assert "All runs" in [part.partition("</summary>")[0] for part in text.split("<details><summary>")[1:]]


def test_a_legend_of_long_names_fits_into_its_figure() -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    ratios = [f"{{0.{index}: 0.6, 0.{index + 1}: 0.25, 1.0: 0.15}}" for index in range(1, 6)]
    runs = (run([0.1, 0.5], sent, keep_ratio=ratio, strategy="EffectiveCohort") for sent, ratio in enumerate(ratios, 1))
    picture = pareto_section(Contents(grouped(*runs), "val_acc", False)).picture
    assert picture is not None
    figure = picture.drawn()
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert min(axes.bbox.height for axes in figure.axes) > 0.45 * figure.bbox.height


def sharding(seed: int, strategy: Any = ls.TopN, keep_ratio: float = 0.2) -> LoggedRun:
    algorithm = as_config(ls.SpectralSharding(strategy(), keep_ratio))
    return made({"federation": {"algorithm": algorithm, "seed": seed}, "lr": 0.1})


def test_runs_that_differ_in_their_seeds_are_one_group() -> None:
    dense = made({"federation": {"algorithm": {"name": "FedAvg"}, "seed": 0}, "lr": 0.1})
    runs = [sharding(0), dense, sharding(1), sharding(0, ls.Collective), sharding(0, keep_ratio=0.1)]
    groups, names = compared.group_runs(runs)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("TopN, keep_ratio=0.2", 2),
        ("FedAvg", 1),
        ("Collective, keep_ratio=0.2", 1),
        ("TopN, keep_ratio=0.1", 1),
    ]
    within = "federation/algorithm"
    assert names == [within, f"{within}/keep_ratio", f"{within}/strategy"]


def test_arguments_are_compared_among_runs_of_one_class_only() -> None:
    lora = {"name": "LoRA", "layers": ["*"], "aggregation": {"name": "SampledTerms"}}
    spectral = {"name": "SpectralSharding", "layers": {"name": "LayerChoices"}, "aggregation": {"name": "TermMeans"}}
    of_matrices = {**spectral, "aggregation": {"name": "MatrixMeans"}}

    def labels(*algorithms: Any) -> list[str]:
        return [group.label for group in compared.group_runs([made({"algorithm": one}) for one in algorithms])[0]]

    assert labels(lora, spectral) == ["LoRA", "SpectralSharding"]
    assert labels(spectral, of_matrices) == ["TermMeans", "MatrixMeans"]
    assert labels(lora, spectral, of_matrices) == [
        "LoRA, aggregation=SampledTerms",
        "SpectralSharding, aggregation=TermMeans",
        "SpectralSharding, aggregation=MatrixMeans",
    ]


def test_a_label_is_short_and_no_two_are_the_same() -> None:
    ratios = [[0.1 + index / 100 for index in range(30)], [0.2 + index / 100 for index in range(30)]]
    groups, _ = compared.group_runs([made({"keep_ratio": one}) for one in ratios])
    first, second = (group.label for group in groups)
    assert first.startswith("keep_ratio=[0.1")
    assert (len(first), len(second), first.endswith("…")) == (51, 51, True)
    groups, _ = compared.group_runs([made(name="run"), replace(made(name="run"), path=Path("other"))])
    assert [group.label for group in groups] == ["run", "run (2)"]


def test_runs_without_settings_are_not_taken_for_repetitions() -> None:
    groups, _ = compared.group_runs([made(name="a"), made(name="b")])
    assert [group.label for group in groups] == ["a", "b"]


def test_runs_are_grouped_by_the_settings_that_are_asked_for() -> None:
    runs = [sharding(0), sharding(0, ls.Collective), sharding(0, keep_ratio=0.1)]
    groups, _ = compared.group_runs(runs, by=["algorithm/keep_ratio"])
    assert [(group.label, len(group.runs)) for group in groups] == [("keep_ratio=0.2", 2), ("keep_ratio=0.1", 1)]
    with pytest.raises(ReportError, match=r"No run .* `ratio`; known settings: .*federation/algorithm/keep_ratio"):
        compared.group_runs(runs, by=["ratio"])


def test_a_band_is_over_the_rounds_that_all_repetitions_have() -> None:
    every = Curve(np.arange(4.0), np.array([0.0, 2.0, 4.0, 6.0]))
    found = measures.band([every, Curve(np.array([1.0, 3.0]), np.array([4.0, 10.0]))])
    assert found is not None
    np.testing.assert_array_equal(found.rounds, [1, 3])
    np.testing.assert_array_equal(found.values, [3, 8])
    np.testing.assert_allclose(found.std, [2**0.5, 8**0.5])
    assert measures.band([every, Curve(np.array([9.0]), np.array([0.0]))]) is None


def test_groups_are_equal_if_all_their_repetitions_are() -> None:
    def logged(strategy: str, seed: int, *values: float) -> LoggedRun:
        rows = [{"fl/round": index, "val_acc": value} for index, value in enumerate(values)]
        return made({"algorithm": {"name": strategy}, "seed": seed}, *rows)

    def equal(*runs: LoggedRun) -> list[list[str]]:
        found = compared.equal_groups(compared.group_runs(runs)[0], lambda one: measures.curve(one, "val_acc"))
        return [[group.label for group in alike] for alike in found]

    top, other = logged("TopN", 0, 0.5, 0.6), logged("TopN", 1, 0.5, 0.7)
    same, swapped = logged("Collective", 0, 0.5, 0.6), logged("Collective", 1, 0.5, 0.7)
    assert equal(top, other, swapped, same) == [["TopN", "Collective"]]
    remark = compared.on_curves(grouped(top, other, swapped, same), "val_acc")
    assert remark.startswith("Curves that are equal to the last digit: TopN = Collective. While `fl/inclusion_entropy`")
    assert equal(top, other, same) == []  # one of two seeds
    assert equal(top, logged("Collective", 0, 0.5, 0.6 + 1e-15)) == []
    assert equal(logged("TopN", 0, 0.5), logged("Collective", 0, 0.5)) == []  # a single dot says nothing
    assert equal(top, other) == []


def test_megabytes_are_all_that_was_sent_until_then() -> None:
    sent = {"words/fl/bytes_down": 1e6, "words/fl/bytes_up": 5e5, "words/fl/bytes_measuring": 2e5, "fl/bytes_up": 3e5}
    rows = ({"fl/round": 0, **sent}, {"fl/round": 1, "fl/loss": 0.0}, {"fl/round": 2, **sent})
    found = measures.megabytes(made({}, *rows))
    assert found is not None
    np.testing.assert_allclose(found.values, [2, 2, 4])
    assert measures.megabytes(made()) is None


def test_the_metric_is_an_evaluation_that_all_runs_have() -> None:
    during = {"fl/round": 0, "fl/bytes_down": 1.0, "acc": 0.9, "train_acc": 0.9}
    after = {"fl/round": 0, "val_loss": 0.5, "val_acc": 0.5, "lr-SGD": 0.1, "fl/clients/val_acc/mean": 0.5}
    whole, unevaluated = made({}, during, after), made({}, during)
    assert measures.choose_metric([whole])[0] == "val_acc"
    assert measures.choose_metric([whole, made({}, {"fl/round": 0, "val_loss": 0.5})])[0] == "val_loss"
    assert measures.choose_metric([whole], "acc")[0] == "acc"
    with pytest.raises(ReportError, match=r"run has no evaluation metric; it has `acc`, `train_acc`.*`--metric`"):
        measures.choose_metric([unevaluated])
    with pytest.raises(ReportError, match=r"run has no evaluation metric in common with the other runs; it has `acc`"):
        measures.choose_metric([whole, unevaluated], named={Path("run")})
    with pytest.raises(ReportError, match=r"run has no metric `f1`; it has `acc`, `train_acc`, `val_acc`, `val_loss`"):
        measures.choose_metric([whole], "f1")


def test_a_run_that_ended_with_nan_is_not_on_the_front() -> None:
    assert compared.pareto_front([1.0, 2.0, 3.0], [math.nan, 0.5, 0.9], lower_is_better=False) == [1, 2]
    assert compared.pareto_front([math.nan, 2.0], [0.9, 0.5], lower_is_better=False) == [1]


def test_of_several_models_the_mean_is_reported() -> None:
    logged = {"a/fl/loss": 1.0, "b/fl/loss": 1.0, "a/fl/terms_visited": 0.25}
    rows = [{"fl/round": 0, "a/acc": 0.2, "b/acc": 0.6}, {"fl/round": 1, "a/acc": 0.3}]
    several = made({}, {"fl/round": 0, **logged}, *rows)
    assert measures.choose_metric([several])[0] == "acc"
    found = measures.curve(several, "acc")
    assert found is not None
    assert (found.rounds.tolist(), found.values.tolist()) == ([0], [pytest.approx(0.4)])
    assert measures.curve(several, "fl/terms_visited") is None
    of_some = measures.curve(several, "fl/terms_visited", of_all=False)
    assert of_some is not None
    assert of_some.values.tolist() == [0.25]


def test_the_spread_over_clients_has_two_ends_and_a_middle() -> None:
    ends = {"lowest_decile": 0.1, "mean": 0.5, "highest_decile": 0.9}
    statistics = {f"fl/clients/acc/{name}": value for name, value in ends.items()}
    logged = made({}, {"fl/round": 0, **statistics})
    assert measures.client_statistics(logged, "val_acc")[0] == "acc"
    three = measures.spread(logged, "val_acc")
    assert three is not None
    assert [one.last for one in three] == [0.1, 0.5, 0.9]
    del statistics["fl/clients/acc/lowest_decile"]
    assert measures.spread(made({}, {"fl/round": 0, **statistics}), "val_acc") is None


def test_seconds_of_a_stage_are_means_over_rounds_and_runs() -> None:
    first = made({}, {"fl/round": 0, "a/fl/seconds_train": 1.0, "b/fl/seconds_train": 2.0}, {"fl/round": 1, "x": 1})
    second = made({}, {"fl/round": 0, "fl/seconds_train": 4.5, "fl/seconds_load": 1.0})
    assert measures.mean_stage_seconds([first, second]) == {"train": 3.0, "load": 0.5}
