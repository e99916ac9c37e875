import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import made_run

from lightning_spectral.errors import ReportError
from lightning_spectral.report.compared import equal_groups, group_runs, pareto_front
from lightning_spectral.report.measures import (
    Curve,
    band,
    choose_metric,
    client_statistics,
    curve,
    mean_stage_seconds,
    megabytes,
    spread,
)
from lightning_spectral.report.runs import LoggedRun


def run(config: Any = None, *logged: Any, name: str = "run") -> LoggedRun:
    return made_run(name, config or {}, logged or [{"fl/round": 0, "val_acc": 0.5}])


def algorithm_of(strategy: str, **options: float) -> dict[str, Any]:
    return {"name": "SpectralSharding", "strategy": {"name": strategy}, **options}


def sharding(seed: int, strategy: str = "TopN", keep_ratio: float = 0.2) -> LoggedRun:
    algorithm = algorithm_of(strategy, keep_ratio=keep_ratio, clip_tau=10.0)
    return run({"federation": {"algorithm": algorithm, "seed": seed}, "lr": 0.1})


def test_runs_that_differ_in_their_seeds_are_one_group() -> None:
    dense = run({"federation": {"algorithm": {"name": "FedAvg"}, "seed": 0}, "lr": 0.1})
    runs = [sharding(0), dense, sharding(1), sharding(0, "Collective"), sharding(0, keep_ratio=0.1)]
    groups, names = group_runs(runs)
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
        return [group.label for group in group_runs([run({"algorithm": one}) for one in algorithms])[0]]

    assert labels(lora, spectral) == ["LoRA", "SpectralSharding"]
    assert labels(spectral, of_matrices) == ["TermMeans", "MatrixMeans"]
    assert labels(lora, spectral, of_matrices) == [
        "LoRA, aggregation=SampledTerms",
        "SpectralSharding, aggregation=TermMeans",
        "SpectralSharding, aggregation=MatrixMeans",
    ]


def test_a_label_is_short_and_no_two_are_the_same() -> None:
    ratios = [[0.1 + index / 100 for index in range(30)], [0.2 + index / 100 for index in range(30)]]
    groups, _ = group_runs([run({"keep_ratio": one}) for one in ratios])
    first, second = (group.label for group in groups)
    assert first.startswith("keep_ratio=[0.1")
    assert (len(first), len(second), first.endswith("…")) == (51, 51, True)
    groups, _ = group_runs([run(name="run"), replace(run(name="run"), path=Path("other"))])
    assert [group.label for group in groups] == ["run", "run (2)"]


def test_runs_without_settings_are_not_taken_for_repetitions() -> None:
    groups, _ = group_runs([run(name="a"), run(name="b")])
    assert [group.label for group in groups] == ["a", "b"]


def test_runs_are_grouped_by_the_settings_that_are_asked_for() -> None:
    runs = [sharding(0), sharding(0, "Collective()"), sharding(0, keep_ratio=0.1)]
    groups, _ = group_runs(runs, by=["keep_ratio"])
    assert [(group.label, len(group.runs)) for group in groups] == [("keep_ratio=0.2", 2), ("keep_ratio=0.1", 1)]
    with pytest.raises(ReportError, match=r"No run .* `ratio`; known settings: .*federation/algorithm/keep_ratio"):
        group_runs(runs, by=["ratio"])


def test_a_band_is_over_the_rounds_that_all_repetitions_have() -> None:
    every = Curve(np.arange(4.0), np.array([0.0, 2.0, 4.0, 6.0]))
    found = band([every, Curve(np.array([1.0, 3.0]), np.array([4.0, 10.0]))])
    assert found is not None
    np.testing.assert_array_equal(found.rounds, [1, 3])
    np.testing.assert_array_equal(found.values, [3, 8])
    np.testing.assert_allclose(found.std, [2**0.5, 8**0.5])
    assert band([every, Curve(np.array([9.0]), np.array([0.0]))]) is None


def test_groups_are_equal_if_all_their_repetitions_are() -> None:
    def logged(strategy: str, seed: int, *values: float) -> LoggedRun:
        rows = [{"fl/round": index, "val_acc": value} for index, value in enumerate(values)]
        return run({"algorithm": algorithm_of(strategy), "seed": seed}, *rows)

    def equal(*runs: LoggedRun) -> list[list[str]]:
        found = equal_groups(group_runs(runs)[0], lambda one: curve(one, "val_acc"))
        return [[group.label for group in alike] for alike in found]

    top, other = logged("TopN", 0, 0.5, 0.6), logged("TopN", 1, 0.5, 0.7)
    same, swapped = logged("Collective", 0, 0.5, 0.6), logged("Collective", 1, 0.5, 0.7)
    assert equal(top, other, swapped, same) == [["TopN", "Collective"]]
    assert equal(top, other, same) == []  # one of two seeds
    assert equal(top, logged("Collective", 0, 0.5, 0.6 + 1e-15)) == []
    assert equal(logged("TopN", 0, 0.5), logged("Collective", 0, 0.5)) == []  # a single dot says nothing
    assert equal(top, other) == []


def test_megabytes_are_all_that_was_sent_until_then() -> None:
    sent = {"words/fl/bytes_down": 1e6, "words/fl/bytes_up": 5e5, "words/fl/bytes_measuring": 2e5, "fl/bytes_up": 3e5}
    found = megabytes(run({}, {"fl/round": 0, **sent}, {"fl/round": 1, "fl/loss": 0.0}, {"fl/round": 2, **sent}))
    assert found is not None
    np.testing.assert_allclose(found.values, [2, 2, 4])
    assert megabytes(run()) is None


def test_the_metric_is_an_evaluation_that_all_runs_have() -> None:
    during = {"fl/round": 0, "fl/bytes_down": 1.0, "acc": 0.9, "train_acc": 0.9}
    after = {"fl/round": 0, "val_loss": 0.5, "val_acc": 0.5, "lr-SGD": 0.1, "fl/clients/val_acc/mean": 0.5}
    assert choose_metric([run({}, during, after)])[0] == "val_acc"
    assert choose_metric([run({}, during, after), run({}, {"fl/round": 0, "val_loss": 0.5})])[0] == "val_loss"
    assert choose_metric([run({}, during, after)], "acc")[0] == "acc"
    with pytest.raises(ReportError, match=r"run has no evaluation metric; it has `acc`, `train_acc`.*`--metric`"):
        choose_metric([run({}, during)])
    with pytest.raises(ReportError, match=r"run has no evaluation metric in common with the other runs; it has `acc`"):
        choose_metric([run({}, during, after), run({}, during)], named={Path("run")})
    with pytest.raises(ReportError, match=r"run has no metric `f1`; it has `acc`, `train_acc`, `val_acc`, `val_loss`"):
        choose_metric([run({}, during, after)], "f1")


def test_a_run_that_ended_with_nan_is_not_on_the_front() -> None:
    assert pareto_front([1.0, 2.0, 3.0], [math.nan, 0.5, 0.9], lower_is_better=False) == [1, 2]
    assert pareto_front([math.nan, 2.0], [0.9, 0.5], lower_is_better=False) == [1]


def test_of_several_models_the_mean_is_reported() -> None:
    logged = {"a/fl/loss": 1.0, "b/fl/loss": 1.0, "a/fl/terms_visited": 0.25}
    rows = [{"fl/round": 0, "a/acc": 0.2, "b/acc": 0.6}, {"fl/round": 1, "a/acc": 0.3}]
    several = run({}, {"fl/round": 0, **logged}, *rows)
    assert choose_metric([several])[0] == "acc"
    found = curve(several, "acc")
    assert found is not None
    assert (found.rounds.tolist(), found.values.tolist()) == ([0], [pytest.approx(0.4)])
    assert curve(several, "fl/terms_visited") is None
    of_some = curve(several, "fl/terms_visited", of_all=False)
    assert of_some is not None
    assert of_some.values.tolist() == [0.25]


def test_the_spread_over_clients_has_two_ends_and_a_middle() -> None:
    ends = {"lowest_decile": 0.1, "mean": 0.5, "highest_decile": 0.9}
    statistics = {f"fl/clients/acc/{name}": value for name, value in ends.items()}
    logged = run({}, {"fl/round": 0, **statistics})
    assert client_statistics(logged, "val_acc")[0] == "acc"
    three = spread(logged, "val_acc")
    assert three is not None
    assert [one.last for one in three] == [0.1, 0.5, 0.9]
    del statistics["fl/clients/acc/lowest_decile"]
    assert spread(run({}, {"fl/round": 0, **statistics}), "val_acc") is None


def test_seconds_of_a_stage_are_means_over_rounds_and_runs() -> None:
    first = run({}, {"fl/round": 0, "a/fl/seconds_train": 1.0, "b/fl/seconds_train": 2.0}, {"fl/round": 1, "x": 1})
    second = run({}, {"fl/round": 0, "fl/seconds_train": 4.5, "fl/seconds_load": 1.0})
    assert mean_stage_seconds([first, second]) == {"train": 3.0, "load": 0.5}
