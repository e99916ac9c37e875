"""Which runs a sweep has, how they are named, and what cannot be a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_spectral.sweep.plan import SweepError, planned_runs, split_values

RATIOS = "{0.2: 0.6, 0.4: 0.4}"
SHARDING = "{class_path: SpectralSharding, init_args: {keep_ratio: 0.2, strategy: TopN}}"


def test_every_combination_has_every_seed_and_a_folder_of_its_own() -> None:
    runs = planned_runs([f"model.algorithm=FedAvg,{SHARDING}", "data.partitioner.alpha=0.3,10"], [0, 1, 2])
    assert len({run.folder for run in runs}) == len({run.name for run in runs}) == len(runs) == 2 * 2 * 3
    assert [run.name for run in runs[::3]] == [
        f"algorithm={algorithm}, alpha={alpha}, seed=0"
        for algorithm in ("FedAvg", "SpectralSharding(keep_ratio=0.2, strategy=TopN)")
        for alpha in ("0.3", "10")
    ]
    assert runs[-1].arguments == (f"--model.algorithm={SHARDING}", "--data.partitioner.alpha=10")
    assert runs[0].folder == Path("algorithm=FedAvg,alpha=0.3/seed=0")
    alike = ["model.models.a.lr=1", "model.models.b.lr=1", "data.partitioner.init_args.alpha=1", "data.seed=1"]
    assert planned_runs(alike, [])[0].name == "a.lr=1, b.lr=1, alpha=1, data.seed=1"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (f"0.1,{RATIOS}", ["0.1", RATIOS]),
        ("[0.1, 0.2],[0.3]", ["[0.1, 0.2]", "[0.3]"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("f(1, {a: [2, 3]}) , x", ["f(1, {a: [2, 3]})", "x"]),
        ("null", ["null"]),
        (" , ", []),
    ],
)
def test_commas_within_brackets_and_quotes_belong_to_a_value(text: str, values: list[str]) -> None:
    assert list(split_values(text)) == values


def test_classes_may_be_typed_in_lower_case_and_by_how_they_begin() -> None:
    varied = ["model.algorithm=spectral,fedavg,lora,my.Algorithm,null", "x.init_args.strategy=topn", "a.b=fedavg"]
    runs = planned_runs(varied, [])
    algorithms = ["SpectralSharding", "FedAvg", "LoRA", "my.Algorithm", "null"]
    assert [dict(run.choices)["algorithm"] for run in runs] == algorithms
    assert runs[0].arguments[1:] == ("--x.init_args.strategy=TopN", "--a.b=fedavg")  # `b` takes no class that we know


def test_values_that_look_alike_in_a_path_have_different_folders() -> None:
    runs = planned_runs([f"a.b={RATIOS},{RATIOS.replace(':', ';')},{'x' * 90},{'x' * 91}"], [])
    folders = [str(run.folder) for run in runs]
    assert len(set(folders)) == 4
    assert all(set("{}: ;/").isdisjoint(folder) and len(folder) < 100 for folder in folders)


@pytest.mark.parametrize(
    ("varied", "seeds", "message"),
    [
        ([], [], "nothing is varied: name settings, as in `--vary"),
        (["a.b="], [0], r"`--vary a.b=` names no value, so there is nothing to run"),
        (["a.b=,"], [], "names no value"),
        (["a.b"], [], r"`--vary a.b`: expected key=value,value"),
        (["=1"], [], "expected key=value,value"),
        (["a.b=1,2", "a.b=3"], [], r"`a.b` is varied twice; put all its values into one `--vary`"),
        (["a.b=1,2,1"], [], r"`--vary a.b` has 1 twice; leave one out"),
        (["a.b=1"], [3, 0, 3], "`--seeds` has 3 twice"),
        (["model.algorithm=fedavg,FedAvg"], [], "has FedAvg twice; leave one out"),
        (["data.partitioner=dirichlet", "a.strategy=p"], [], "`--vary a.strategy=p` may mean PrefixChannels or PriSM"),
        (["a.b={0.2: 0.6"], [], r"'\{0.2: 0.6' has no \} to what it opens; in a shell, put it between quotes"),
    ],
)
def test_what_is_no_sweep_is_refused_with_the_remedy(varied: Sequence[str], seeds: Sequence[int], message: str) -> None:
    with pytest.raises(SweepError, match=message):
        planned_runs(varied, seeds)
