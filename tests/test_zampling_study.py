"""The commands of Zampling's study: plans, report and coder; the runs themselves need MNIST, which is not committed."""

import io
import json
import math
import os
import pickle
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import HARDLY_MOVED
from study_files import studied
from torch import nn

import lightning_spectral as ls

pytest.importorskip("matplotlib", reason="the report draws")

pytestmark = pytest.mark.slow
MODULES = ("digits", "tables", "tasks", "plans", "federated", "report", "coding", "remainder", "rates")


study = studied("zampling", MODULES)


def test_every_run_has_a_file_of_its_own_an_algorithm_and_a_task(study: Any) -> None:
    specs = {spec for plan in study.plans.PLANS.values() for spec in plan()}
    assert len({spec.path for spec in specs}) == len(specs)
    for spec in specs:
        assert spec.task in study.tasks.TASKS
        assert spec.algorithm == spec.algorithm


def test_runs_of_the_main_task_keep_their_file_names(study: Any) -> None:
    assert study.plans.Spec("published", 32).path.name == "published_32_0.1_False_1.0_0.0_1_40_0.json"


def test_the_network_of_fedpm_has_as_many_weights_as_its_authors_count(study: Any) -> None:
    with torch.device("meta"):
        net = study.tasks.conv4()
    assert sum(parameter.numel() for parameter in net.parameters()) == 1_933_258
    assert net(torch.empty(2, 784, device="meta")).shape == (2, 10)


def toy_task(study: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of 60 images, every second one is for training, three for each client, and every third one is for testing."""
    labels = torch.arange(60) // 6
    images = nn.functional.one_hot(labels, 784).float()
    monkeypatch.setattr(study.tasks, "mnist", lambda: (images, labels, images, labels))
    return study.tasks.Task(lambda: nn.Sequential(nn.Linear(784, 10)), 3, train_stride=2, test_stride=3, num_samples=2)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_larger_learning_rate_moves_probabilities_farther_and_a_small_one_is_marked(study, monkeypatch, optimizer):
    toy = toy_task(study, monkeypatch)
    small, large = (study.rates.train(optimizer, lr, toy, num_rounds=1) for lr in (1e-3, 10.0))
    assert 0 < small.moved < large.moved < 1
    assert study.rates.row(optimizer, 1e-3, small).split(" | ")[3] == "yes"
    assert study.rates.row(optimizer, 10.0, large).split(" | ")[3] == ""


# every client counts anew, which is the point of it
@pytest.mark.filterwarnings("ignore:Round 0. clients change .least.:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize(
    ("lr", "patience", "steps"),
    [(0.0, 0, 10 * 6), (0.0, 3, 10 * (1 + 3)), (1e-7, 3, 10 * (1 + 3)), (0.01, 3, 10 * 6)],
    ids=["none", "no progress", "less than delta", "progress"],
)
def test_a_client_stops_after_so_many_epochs_without_a_lower_loss(study, monkeypatch, lr, patience, steps):
    """Ten clients with one batch each, and six local epochs."""
    toy, calls = toy_task(study, monkeypatch), []

    class Counting(study.tasks.Classifier):  # type: ignore[misc, name-defined]
        def training_step(self, batch: Any) -> Any:
            calls.append(self.waited)
            return super().training_step(batch)

    model = ls.FederatedModule(Counting(toy.net(), lr, patience=patience), clients_per_round=10, local_epochs=6)
    study.federated.quiet_trainer(1, [], 1).fit(model, study.tasks.deal(toy))
    assert len(calls) == steps
    assert max(calls) < max(patience, 1)


@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize(
    ("setup", "compression", "down", "up"),
    [
        ("FedAvg", 0, 4 * 7850, 4 * 7850),
        ("FedPM", 1, 4 * 7850, 982),  # ceil(7850 / 8)
        ("FedPM, posterior mean", 1, 4 * 7850, 982),
        ("He start", 8, 4 * 982, 123),
        ("2 bits down", 8, 246, 123),
    ],
)
def test_a_run_says_what_travelled_and_how_good_networks_became(study, monkeypatch, setup, compression, down, up):
    monkeypatch.setitem(study.tasks.TASKS, "toy", toy_task(study, monkeypatch))
    run = study.federated.train(study.plans.Spec(setup, compression, num_rounds=study.federated.EVERY, task="toy"))
    assert (run["down"], run["up"]) == (down, up)
    assert [len(run["accuracy"]), len(run["sampled"])] == [1, 2 if compression else 0]
    assert all(20 * accuracy == pytest.approx(round(20 * accuracy)) for accuracy in run["accuracy"] + run["sampled"])


def test_the_report_has_a_row_for_each_compression_and_each_other_setting(study: Any) -> None:
    spec = study.plans.Spec
    study.plans.OUTPUT.mkdir(parents=True)
    main = (spec("published", 32), spec("published", 32, seed=1), spec("He start", 8), spec("He start", 8, seed=1))
    fed_pm = [one for one in study.plans.posteriors() if one.setup == "FedPM"]
    for one in (*main, spec("2 bits down", 32, num_rounds=20), next(study.plans.fedpm()), *fed_pm):
        outcome = {"accuracy": [0.5, 0.9], "sampled": [0.8, 0.9], "down": 4 * 8332, "up": 1042}
        one.path.write_text(json.dumps({**asdict(one), **outcome}))
    study.report.main()
    text = Path("docs/zampling_tables.md").read_text()
    assert "| 32 | 40 | 2 | 1023.5 | 32.0 | 90.00 ± 0.00 | 85.00 ± 0.00 | 0.93 |" in text
    names = ("others", "posteriors", "downlink")
    others, fed_pms, downlink = (Path(f"docs/tables/zampling_{name}.csv").read_text() for name in names)
    assert "He start,8,40,0.1,1.0,0.0,1,,2,90.00 ± 0.00,85.00 ± 0.00" in others
    assert fed_pms.count(f'FedPM,1,{len(fed_pm)},"33,328","1,042",') == 1
    assert '2 bits down,32,1,"33,328","1,042",32.0,1023.5,90.00,85.00' in downlink
    row = "| continuous, coordinated | 32 | 1 | 33,328 | 1,042 | 232.0 | 7421.3 | 90.00 | 85.00 |"
    assert row in Path("docs/zampling_conv4.md").read_text()
    assert row not in text
    assert Path("docs/zampling.svg").exists()


def test_what_zampling_could_save_beside_sharding_is_counted_without_norms(study: Any) -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 3))
    factors, ends, biases, norm = 16 * (64 + 64), 64 * (8 + 3), 64 + 64 + 3, 2 * 64
    dense = ends + biases + norm
    assert study.remainder.way(net, 0.25, ls.LayerChoices()) == (4 * (factors + dense), 4 * dense, 4 * (ends + biases))


@pytest.mark.parametrize("seed", range(3))
def test_coded_bits_come_back_and_take_little_more_than_their_entropy(study: Any, seed: int) -> None:
    draw = random.Random(seed)
    half = study.coding.HALF
    ones = [draw.choice([1, 40, half // 2, half - 40, half - 1]) for _ in range(4000)]
    bits = [int(draw.random() < one / half) for one in ones]
    coded = study.coding.encode(bits, ones)
    assert study.coding.decode(coded, ones) == bits
    entropy = -sum(math.log2(one / half if bit else 1 - one / half) for bit, one in zip(bits, ones, strict=True))
    # the interval is at least 2^24 wide, so a bit loses at most 2^-11 of its probability; and four bytes at the end
    assert 8 * len(coded) <= entropy + len(bits) * 2**-10 + 40


def test_a_decoder_with_other_probabilities_gets_other_bits(study: Any) -> None:
    half = study.coding.HALF
    bits = [0, 1] * 100
    assert study.coding.decode(study.coding.encode(bits, [half // 3] * 200), [half // 2] * 200) != bits


def test_a_pickle_that_could_run_code_is_not_read(study: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"\.system has no place in a file of arrays"):
        study.digits.ArraysOnly(io.BytesIO(pickle.dumps(os.system))).load()
