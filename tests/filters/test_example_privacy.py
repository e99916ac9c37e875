"""Steps that hide single examples: against a loop by hand, the accountant itself, and an audit."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import NormalDist
from typing import Any

import other_process
import pytest
import torch
from audits import lower_bound
from fake_line import line_of, remote, toy_client_data
from federation import Fit, ScalesAlone, check_resumes, said_during, same_state, seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitMLP, LitSmall, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral import network
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import Instructions
from lightning_spectral.client.local_loop import LocalSettings, LocalTask, Placement, Recorder
from lightning_spectral.filters import example_privacy
from lightning_spectral.filters.example_privacy import ExampleEnd, ExampleLoop, ExamplePrivacy
from lightning_spectral.functional.privacy import epsilon, grid_of, shortened
from lightning_spectral.network.messages import Kind, Part, Start, digest_of, record_of, record_parts
from lightning_spectral.network.objects import write_object
from lightning_spectral.plugin.callbacks.dashboard import client_table
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.protocol.rng import SecretNormals

dp = pytest.importorskip("dp_accounting", reason="epsilon needs the extra `privacy`")
CLIP, NOISE, DELTA = 0.7, 0.8, 1e-3
PRIVACY = ExamplePrivacy(clip=CLIP, noise_multiplier=NOISE, delta=DELTA, noise_seed=1)
STILL = partial(LitMLP, dropout=0.0)


class Line(nn.Module):
    """A line without an offset; or no loss at all, so that nothing but noise moves it."""

    def __init__(self, size: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(size)), scale
        self.batches: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.batches.append(batch_idx)
        return self.scale * (x @ self.weight).sum()


def steps(
    privacy: ExamplePrivacy, x: Tensor, batch_size: int, epochs: int = 1, scale: float = 1.0
) -> tuple[Line, Tensor]:
    """A line after SGD at rate 1 on some examples, and what each step has subtracted from it."""
    line, taken = Line(x.shape[1], scale), list[Tensor]()
    optimizer = torch.optim.SGD(line.parameters(), lr=1.0)
    settings = LocalSettings(Placement(moves_batches=False), defines=lambda *_: False)
    loop = ExampleLoop(privacy, int, line, [optimizer], settings)
    data = ClientData(BatchSource(TensorDataset(x)), torch.arange(len(x)), batch_size, seed=0, ids=(0, 0))
    noted = [[lambda: taken.append(line.weight.grad.clone())]]  # type: ignore[union-attr]
    loop._is_compared, loop._num_flat = True, -1  # it notes its batches; its examples may be zero
    loop(LocalTask(Download(WorkUnit(0), 1.0, {}, local_epochs=epochs), data, Recorder(line), before_step=noted))
    return line, torch.stack(taken)


# -- the mechanism


def test_a_turn_is_a_loop_by_hand(fit: Fit) -> None:
    """Two epochs of one client: every draw, gradient, noise and step, with plain autograd and SGD."""
    examples = toy_examples(10)
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(1), batch_size=4)
    lit = seeded(STILL)
    net, x, y = seeded(STILL), *examples.tensors
    fit(lit, data, clients_per_round=1, local_epochs=2, filters=[PRIVACY])
    weights, order = list(net.parameters()), data.partition.indices
    numbers, optimizer = SecretNormals(repr((1, 0, 0)).encode()), torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(2):
        for drawn in [numbers.uniform(10) < 4 / 10 for _ in range(3)]:
            total = torch.zeros(sum(p.numel() for p in weights), dtype=torch.float64)
            for i in order[drawn].tolist():
                own = torch.autograd.grad(nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), weights)
                vector = torch.cat([g.double().flatten() for g in own])
                total += vector * min(1.0, CLIP / float(vector.norm()))
            noise = numbers(len(total)) * NOISE * CLIP
            gradient = (total + noise) / (10 * 4 / 10)
            for p, g in zip(weights, gradient.split([p.numel() for p in weights]), strict=True):
                p.grad = g.view_as(p).float()
            optimizer.step()
    torch.testing.assert_close([*lit.parameters()], weights, rtol=0, atol=100 * grid_of(NOISE * CLIP))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Opacus' own
def test_a_turn_without_its_noise_and_its_epsilon_are_those_of_opacus(fit: Fit, monkeypatch: Any) -> None:
    pytest.importorskip("opacus", reason="Opacus is an oracle here, and no dependency")
    from opacus.accountants import PRVAccountant
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    monkeypatch.setattr(SecretNormals, "__call__", lambda self, size: torch.zeros(size, dtype=torch.float64))
    lit, examples = seeded(STILL), toy_examples(40)
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(1), batch_size=10)
    net, (x, y), numbers = GradSampleModule(seeded(STILL)), examples.tensors, SecretNormals(repr((1, 0, 0)).encode())
    plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = DPOptimizer(plain, noise_multiplier=0.0, max_grad_norm=CLIP, expected_batch_size=10)
    fit(lit, data, clients_per_round=1, local_epochs=2, filters=[PRIVACY])
    for drawn in (numbers.uniform(40) < 1 / 4 for _ in range(8)):
        optimizer.zero_grad()
        own = data.partition.indices[drawn]
        nn.functional.cross_entropy(net(x[own]), y[own]).backward()
        optimizer.step()
    torch.testing.assert_close([*lit.parameters()], [*net.parameters()], rtol=1e-4, atol=1e-6)  # it adds 1e-6 to norms
    accountant = PRVAccountant()
    accountant.history = [(NOISE, 1 / 4, 8)]
    assert epsilon(1 / 4, NOISE, 8, DELTA) == pytest.approx(accountant.get_epsilon(DELTA), rel=0.01)


class Norms(ls.client.LocalHook):
    """Notes the norm of each gradient that a step uses."""

    seen: list[float]

    def start_client(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        return lambda: self.seen.append(float(torch.cat([p.grad.flatten() for p in own if p.grad is not None]).norm()))


FORMS = [ls.FedAvg(), ls.SpectralSharding(ls.TopN(), 0.5), ls.LoRA(2), ls.FIARSE(0.5), ls.StaleUpdates()]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: type(form).__name__)
def test_one_example_moves_a_step_of_any_form_by_the_bound(form: Any, fit: Fit, monkeypatch: Any) -> None:
    monkeypatch.setattr(SecretNormals, "__call__", lambda self, size: torch.zeros(size, dtype=torch.float64))
    monkeypatch.setattr(Norms, "seen", seen := [], raising=False)
    alone = ls.FederatedDataModule(toy_examples(3), ls.IIDPartitioner(3), batch_size=1)
    small = [replace(PRIVACY, clip=1e-3)]
    fit(seeded(STILL), alone, algorithm=form, clients_per_round=3, filters=small, local_hooks=[Norms()])
    assert len(seen) == 3
    assert all(0.9e-3 < norm <= 1e-3 * (1 + 1e-6) for norm in seen)


def check_noise(taken: Tensor, std: float) -> None:
    """Five deviations of the estimates themselves."""
    count = taken.numel()
    assert abs(float(taken.mean())) < 5 * std / math.sqrt(count)
    assert abs(float(taken.square().mean()) / std**2 - 1) < 5 * math.sqrt(2 / count)


def test_noise_has_its_deviation_and_batches_that_of_their_draws() -> None:
    line, taken = steps(PRIVACY, torch.zeros(20, 50), batch_size=2, epochs=40)
    std = NOISE * CLIP / 2
    check_noise(taken, std)
    with pytest.raises(AssertionError):
        check_noise(steps(replace(PRIVACY, noise_multiplier=1.1 * NOISE), torch.zeros(20, 50), 2, 40)[1], std)
    assert len(taken) == 400
    mean, variance = 400 * 2, 400 * 2 * (1 - 2 / 20)
    assert abs(len(line.batches) - mean) < 5 * math.sqrt(variance)  # of all draws together


def test_a_step_without_examples_is_noise_alone() -> None:
    line, taken = steps(PRIVACY, torch.ones(50, 3), batch_size=1)
    empty = [i for i in range(50) if i not in line.batches]
    assert 5 < len(empty) < 32  # each with probability 0.364
    drawn = sorted({*range(50)} - {*empty})
    others, without = steps(PRIVACY, torch.ones(50, 3), batch_size=1, scale=-1.0)
    assert others.batches == line.batches
    assert torch.equal(taken[empty], without[empty])
    assert not (taken[drawn] == without[drawn]).any()


def test_a_gradient_that_is_not_finite_counts_as_none() -> None:
    broken, zero = (steps(PRIVACY, torch.full((1, 3), value), batch_size=1)[1] for value in (math.nan, 0.0))
    assert torch.equal(broken, zero)


def test_noise_and_draws_are_secrets() -> None:
    torch.manual_seed(0)
    secret, x = replace(PRIVACY, noise_seed=None), torch.zeros(20, 5)
    (one, first), (other, again) = (steps(secret, x, batch_size=4, epochs=3) for _ in range(2))
    assert not torch.equal(first, again)
    assert one.batches != other.batches


def audited(num_runs: int = 800) -> float:
    """A lower bound on the epsilon of two steps, with and without an example that moves them as far as it may."""
    scores: list[list[float]] = [[], []]
    for run in range(num_runs):
        for planted in (0, 1):
            privacy = replace(PRIVACY, clip=1.0, noise_multiplier=1.5, noise_seed=2 * run + planted)
            scores[planted].append(float(steps(privacy, torch.tensor([[100.0 * planted], [0.0]]), 2, 2)[1].sum()))
    return lower_bound(scores[1], scores[0], DELTA)


@pytest.mark.slow
def test_an_audit_finds_no_more_than_is_claimed_and_finds_a_bound_that_is_not_kept(monkeypatch: Any) -> None:
    claim, kept = epsilon(1.0, 1.5, 2, DELTA), example_privacy.shortened
    assert 0.2 < audited() <= claim
    monkeypatch.setattr(example_privacy, "shortened", lambda change, clip, grid: kept(change, 20 * clip, grid))
    assert audited() > claim


# -- epsilon


SIZES = (4, 26)  # less than a batch, and several


def uneven() -> ls.FederatedDataModule:
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    return ls.FederatedDataModule(toy_examples(sum(SIZES)), ls.NaturalPartitioner(owners), batch_size=5)


def asked(size: int, num_epochs: int) -> float:
    """The accountant's own epsilon, as the privacy loss distribution of a client's steps."""
    event: Any = dp.GaussianDpEvent(NOISE)
    event = event if size <= 5 else dp.PoissonSampledDpEvent(5 / size, event)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=1e-3)
    return float(accountant.compose(event, num_epochs * -(-size // 5)).get_epsilon(DELTA))


MEDIAN = ls.Robust(ls.Median())


class Told(ls.RoundCallback):
    """What is known of each client after its last turn."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}
        self.left_out: list[dict[str, int]] = []

    def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
        self.of |= {c.client_id: c.figures["example_epsilon"] for c in summary.averaged}
        self.left_out.append(dict(summary.left_out))
        shown = client_table(summary, [])
        column = [dict(zip(shown.columns, row, strict=True)).get("example_epsilon") for row in shown.rows]
        assert column == [client.example_epsilon for client in summary.clients]
        assert all(math.isnan(client.loss) and not client.logged for client in summary.clients)


def test_each_client_has_the_epsilon_of_its_own_turns(fit: Fit) -> None:
    told = Told()
    run = fit(
        seeded(LitMLP), uneven(), clients_per_round=2, max_epochs=2, local_epochs=2, filters=[PRIVACY], callbacks=[told]
    )
    assert told.of == pytest.approx({client: asked(size, 4) for client, size in enumerate(SIZES)})
    assert {row.client_id: row.example_epsilon for row in run.ledger.rows} == told.of
    assert run.history.rows[-1]["fl/example_epsilon"] == pytest.approx(max(told.of.values()))
    assert "fl/loss" not in run.history.rows[-1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("filters", [[PRIVACY, MEDIAN], [MEDIAN, PRIVACY], [PRIVACY, ls.SecureSums()]], ids=repr)
def test_the_ledger_has_an_epsilon_whatever_holds_updates_back(filters: Any, fit: Fit) -> None:
    run = fit(seeded(LitMLP), uneven(), clients_per_round=len(SIZES), filters=filters)
    assert [row.example_epsilon for row in run.ledger.rows] == [pytest.approx(asked(size, 1)) for size in SIZES]


def test_without_draws_it_is_that_of_the_gaussian_mechanism() -> None:
    """Dong et al. (2022), Gaussian differential privacy, corollary 1: T steps are one with z / sqrt(T)."""
    normal, num_steps = NormalDist(), 12
    mu = math.sqrt(num_steps) / NOISE

    def delta(eps: float) -> float:
        return normal.cdf(mu / 2 - eps / mu) - math.exp(eps) * normal.cdf(-mu / 2 - eps / mu)

    found = epsilon(1.0, NOISE, num_steps, DELTA)
    assert delta(found + 1e-3) < DELTA < delta(found - 0.05)  # the grid of privacy losses


def test_a_budget_for_some_passes_is_spent_in_them_and_no_client_exceeds_it(fit: Fit) -> None:
    told, budget = Told(), ExamplePrivacy(clip=1.0, target_epsilon=3.0, num_epochs=3, delta=DELTA, noise_seed=1)
    noises = [budget.multiplier(size, 5) for size in SIZES]
    assert noises == sorted(noises, reverse=True)
    warned = said_during(
        lambda: fit(seeded(LitMLP), uneven(), clients_per_round=2, max_epochs=9, filters=[budget], callbacks=[told])
    )
    assert len(told.left_out) == 3  # then all have spent it, and the fit ends
    assert all(2.9 < found <= 3.0 for found in told.of.values())
    assert warned == []


def test_a_client_that_has_spent_its_budget_takes_no_part_and_the_run_says_so(fit: Fit) -> None:
    told, limit = Told(), asked(26, 4)
    turns = [next(n for n in count() if asked(size, n + 1) > limit) for size in SIZES]
    assert 0 < min(turns) < max(turns) == 4
    options = {"clients_per_round": 2, "max_epochs": 9, "filters": [replace(PRIVACY, target_epsilon=limit)]}
    warned = said_during(lambda: fit(seeded(LitMLP), uneven(), callbacks=[told], **options))
    spent = [[client for client, own in enumerate(turns) if own <= round_idx] for round_idx in range(4)]
    assert [found.get("spent", 0) for found in told.left_out] == [len(clients) for clients in spent]  # then it ends
    assert told.of == pytest.approx({client: asked(size, turns[client]) for client, size in enumerate(SIZES)})
    newly = {r: ", ".join(str(c) for c in range(2) if turns[c] == r) for r in sorted({*turns} - {4})}
    assert [line.partition(" have")[0] for line in warned] == [f"Round {r}: clients {c}" for r, c in newly.items()]


# -- the run


def test_resume_equals_uninterrupted_run(data: Any, fit: Fit, tmp_path: Path) -> None:
    part = check_resumes(fit, LitMLP, data, tmp_path, filters=[PRIVACY])
    again = fit(part.model, data, max_epochs=1)  # a second fit goes on counting
    assert again.history.rows[-1]["fl/example_epsilon"] > part.history.rows[-1]["fl/example_epsilon"]


OTHERS: dict[str, Any] = {"participation": ls.Uniform(active=4), "clients_per_round": None}
BOTH = [PRIVACY, ls.ClientPrivacy(clip=1.0, noise_multiplier=1.0, delta=1e-3)]
# each notes what it has seen, computes gradients or steps in a way of its own, or averages data
counts = variant(LitMLP, before_step=lambda lit, batch: setattr(lit, "seen", lit.seen + 1), seen=0)
backward = variant(LitMLP, backward=lambda self, loss, *args, **options: loss.backward())
by_hand = variant(LitMLP, lambda lit: setattr(lit, "automatic_optimization", False))
searches = variant(LitMLP, configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters()))
averages = variant(LitMLP, lambda lit: lit.register_buffer("mean", torch.zeros(3)))
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "BatchNorm": (LitSmall, {}, r"BatchNorm \(net\.1\), in which examples mix; use GroupNorm"),
    "a loss": (LitMLP, {"algorithm": ls.QFedAvg()}, "send back nothing but new values .* QFedAvg does not promise"),
    "averages": (averages, {}, "clients would send back the buffers mean"),
    "by hand": (by_hand, {}, "manual optimisation in Lit; return the loss"),
    "own backward": (backward, {}, "`backward` of Lit"),
    "a closure": (searches, {}, "LBFGS, which evaluates the loss itself"),
    "state": (counts, {}, "seen, by which an example acts on the next"),
    "labels": (LitMLP, {"local_hooks": [ls.MaskedLogits("net.5")]}, "MaskedLogits, which sees a client's data"),
    "losses": (LitMLP, {**OTHERS, "participation": ls.LossVarianceReduced(active=5)}, "which measures clients"),
    "evaluation": (LitMLP, {"callbacks": [ls.ClientEvaluation()]}, "ClientEvaluation, which reads clients' data"),
    "phases": (LitMLP, {"algorithm": ls.Ditto()}, "Ditto, which trains in phases; use Personal"),
    "epochs": (LitMLP, {"filters": [PRIVACY, ls.Personal(["net.5.*"], epochs=1)]}, "training in phases, as in Ditto"),
    "both": (LitMLP, {**OTHERS, "filters": BOTH}, "ClientPrivacy, which hides who takes part"),
    "scaled": (LitMLP, {"trainer": {"plugins": [ScalesAlone()]}}, "precision '16-mixed'"),
    "accumulated": (LitMLP, {"trainer": {"accumulate_grad_batches": 2}}, "accumulation"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_bound_does_not_cover_is_refused_by_name(what: str, data: Any, fit: Fit) -> None:
    make, options, words = REFUSED[what]
    with pytest.raises(Exception, match=words) as caught:
        fit(seeded(make), data, **{"filters": [PRIVACY], **options})
    assert "ExamplePrivacy" in str(caught.value) or what == "accumulated"


def test_rounding_makes_no_example_longer_than_the_bound() -> None:
    """To the nearest step, both entries would become 2."""
    assert shortened(torch.tensor([3.0, 3.0], dtype=torch.float64), clip=2.6, grid=1.0).tolist() == [1.0, 1.0]


# -- on devices, which count for themselves


def hiding(folder: Path, lit: Any = LitMLP, batch_size: int = 4, **choice: Any) -> Any:
    """A line of devices whose owners hide their examples."""
    own: dict[str, Any] = {"batch_size": batch_size, "example_privacy": replace(PRIVACY, **choice)}
    clients = enumerate(toy_client_data())
    datas = [{"": network.ClientData(examples, state_folder=str(folder / str(i)), **own)} for i, examples in clients]
    return line_of([{"": lit}] * 12, datas)


EVERYBODY: dict[str, Any] = {"clients_per_round": 12, "max_epochs": 2}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(ls.TopN(), 0.4), ls.LoRA(2)], ids=repr)
def test_devices_train_as_with_the_filter_and_say_their_epsilon(algorithm: Any, fit: Fit, tmp_path: Path) -> None:
    options = {**EVERYBODY, "algorithm": algorithm, "local_epochs": 2}
    theirs = fit(seeded(LitMLP), other_process.toy_data(), filters=[PRIVACY], **options)
    ours = fit(seeded(LitMLP), remote(hiding(tmp_path)), **options)
    assert same_state(ours.tensors, theirs.tensors)
    sizes = list(map(len, toy_client_data()))
    for turns, row in enumerate(ours.history.rows, start=1):
        said = [epsilon(min(1.0, 4 / n), NOISE, 2 * turns * math.ceil(n / 4), DELTA) for n in sizes]
        mean = sum(own * n for own, n in zip(said, sizes, strict=True)) / sum(sizes)
        assert row["clients/example_epsilon"] == pytest.approx(mean)
        assert row["fl/example_epsilon"] == pytest.approx(max(said))
        rows = [turn for turn in ours.ledger.rows if turn.round_idx == turns - 1]
        assert {turn.client_id: turn.example_epsilon for turn in rows} == pytest.approx(dict(enumerate(said)))


@pytest.mark.filterwarnings("ignore:Round .. no client is left")
def test_devices_count_all_runs_and_take_no_part_beyond_their_budget(fit: Fit, tmp_path: Path) -> None:
    """Two rounds, and three of another run, whose devices are new processes: a server cannot begin anew."""
    (size,) = set(map(len, toy_client_data()))
    for seed, rounds, spent in ((0, 2, [0, 0]), (1, 3, [0, 12, 12])):
        options = {**EVERYBODY, "seed": seed, "max_epochs": rounds}
        run = fit(seeded(LitMLP), remote(hiding(tmp_path, batch_size=5, target_epsilon=asked(size, 3))), **options)
        assert [row.get("fl/left_out_spent", 0.0) for row in run.history.rows] == spent
    assert run.history.rows[0]["clients/example_epsilon"] == pytest.approx(asked(size, 3))
    for client in range(12):
        spent_by = json.loads((tmp_path / str(client) / "spent.json").read_text())
        assert spent_by == [[min(1.0, 5 / size), NOISE, 3 * math.ceil(size / 5)]]


def test_turns_of_several_processes_with_one_folder_are_all_counted(tmp_path: Path, monkeypatch: Any) -> None:
    data = network.ClientData(toy_client_data()[0], 4, state_folder=str(tmp_path / "state"), example_privacy=PRIVACY)
    assert data.spend(PRIVACY) == 0.0
    assert not (tmp_path / "state").exists()  # asking writes nothing
    monkeypatch.setattr(network.device, "epsilon_of", lambda *_: time.sleep(0.02) or 1.0)  # all read before one writes
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda steps: data.spend(PRIVACY, steps), range(1, 5)))
    ((_, _, steps),) = json.loads((tmp_path / "state" / "spent.json").read_text())
    assert steps == 10


def test_a_device_refuses_what_would_tell_of_its_examples(fit: Fit, tmp_path: Path, monkeypatch: Any) -> None:
    examples = toy_client_data()[0]
    with monkeypatch.context() as lacking:
        lacking.setitem(sys.modules, "dp_accounting", None)
        with pytest.raises(ModuleNotFoundError, match=r"\[privacy\]"):
            network.ClientData(examples, example_privacy=PRIVACY, state_folder="a")
    for given, words in (({"state_folder": "a", "val": examples}, "leave one out"), ({}, "`state_folder`; give one")):
        with pytest.raises(ValueError, match=words):
            network.ClientData(examples, example_privacy=PRIVACY, **given)
    for lit, options, words in (
        (LitMLP, {"algorithm": ls.QFedAvg()}, r"hides its loss \(`example_privacy`\)"),
        (partial(LitMLP, momentum=0.0), {"algorithm": ls.Scaffold()}, "divides by a client's steps, and it hides how"),
        (LitMLP, {"local_hooks": [ls.MaskedLogits("net.5")]}, "MaskedLogits, which sees a client's data"),
        (LitSmall, {}, "BatchNorm"),
        (LitMLP, {"filters": [PRIVACY]}, r"clients elsewhere: .* ClientData\(example_privacy=...\)"),
    ):
        with pytest.raises(Exception, match=words):
            fit(seeded(lit), remote(hiding(tmp_path, lit)), **{**EVERYBODY, **options})
        spent = list(tmp_path.glob("*/spent.json"))
        assert bool(spent) is (options.get("algorithm") == ls.Scaffold())
        for file in spent:
            file.unlink()


def test_no_filter_of_the_server_decides_how_a_device_with_private_examples_trains(tmp_path: Path) -> None:
    (device, *_) = hiding(tmp_path).there.values()
    told = Instructions(DenseSide(()), {"weaker": ExampleEnd(replace(PRIVACY, noise_multiplier=0.05))})
    kept = device.make()._hiding(Start("", told), LitMLP()).instructions.ends
    assert list(kept.values()) == [*told.ends.values(), ExampleEnd(PRIVACY)]  # the last one trains


class Leaks(LitMLP):
    """Adds up its examples where no optimizer steps: in a buffer, or a parameter."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("seen", torch.zeros(6))
        self.other = nn.Parameter(torch.zeros(6), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (self.seen if self.leaks == "seen" else self.other.data).add_(batch[0].sum(0))
        return super().training_step(batch, batch_idx)


def ask(
    device: Any, lit: Any, returned: tuple[str, ...], without: tuple[str, ...] = (), lr: float = 0.1, **told: Any
) -> Upload:
    """What a device answers to a server that says what it likes."""
    start = write_object(Start("", Instructions(DenseSide(returned))))
    tensors = {n: t.detach().clone() for n, t in named_state(lit).items() if n not in without}
    (group,) = torch.optim.SGD(lit.parameters(), lr=lr).param_groups
    options = (({name: value for name, value in group.items() if name != "params"},),)
    download = Download(WorkUnit(0), 1.0, tensors, options=options, **told)
    parts = {**record_parts(download), Part.START: start, Part.DIGEST: digest_of(start)}
    return record_of(device.answer(Kind.TRAIN, parts), Upload)


@pytest.mark.parametrize(
    "told",
    [{"local_epochs": 0, "local_steps": 5}, {"local_epochs": -1, "local_steps": 5}, {"held": frozenset({"other"})}],
    ids=["no epochs", "fewer than none", "held"],
)
def test_whatever_a_device_is_told_it_counts_the_steps_that_it_takes(told: dict[str, Any], tmp_path: Path) -> None:
    device, lit = next(iter(hiding(tmp_path).there.values())).make(), LitMLP()
    names = tuple(name for name, _ in lit.named_parameters())
    (size,) = set(map(len, toy_client_data()))
    upload, steps = ask(device, lit, names, **told), told.get("local_steps", math.ceil(size / 4))
    assert any(not torch.equal(upload.tensors[name], p) for name, p in lit.named_parameters())
    ask(device, lit, names, local_epochs=1, local_steps=-2)  # nothing is given back
    (file,) = tmp_path.glob("*/spent.json")
    assert json.loads(file.read_text()) == [[4 / size, NOISE, steps]]


@pytest.mark.parametrize("where", ["seen", "other"])
def test_nothing_of_an_example_is_left_where_a_server_could_ask_for_it(where: str, tmp_path: Path) -> None:
    kind = variant(Leaks, leaks=where)
    device, lit = next(iter(hiding(tmp_path, kind).there.values())).make(), kind()
    assert ask(device, lit, (where,)).left_out == "error"
    left = ask(device, lit, (where,), local_epochs=0, without=(where,))
    assert not left.tensors.get(where, torch.zeros(6)).any()


def test_steps_without_a_loss_are_steps(tmp_path: Path) -> None:
    """Or it would tell whether any example has one."""
    kind = variant(LitMLP, training_step=lambda *_: None)
    device, lit = next(iter(hiding(tmp_path, kind).there.values())).make(), kind()
    upload = ask(device, lit, tuple(name for name, _ in lit.named_parameters()), lr=0.0)
    assert upload.left_out is None


@pytest.mark.parametrize("kind", ["contrastive", "of single examples"])
def test_a_loss_that_compares_examples_says_that_only_noise_is_learned(kind: str, fit: Fit) -> None:
    """Each example is a batch of one, whose contrastive loss is the log of one probability, which is 1."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        similar = self.net(batch[0])
        return nn.functional.cross_entropy(similar @ similar.T, torch.arange(len(similar)))

    module = variant(LitMLP, **({"training_step": training_step} if kind == "contrastive" else {}))
    data = ls.FederatedDataModule(toy_examples(48), ls.IIDPartitioner(4), batch_size=4)
    said = said_during(lambda: fit(seeded(module), data, filters=[PRIVACY], max_epochs=2))
    flat = [one for one in said if "learned from noise alone" in one]
    assert len(flat) == (kind == "contrastive")
