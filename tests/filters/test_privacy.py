"""Differential privacy of clients: what it amounts to, what leaves a round, and wrong ways, which are caught."""

import math
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from audits import lower_bound
from bare_engine import bare_engine
from federation import Fit, check_resumes, said_during, same_state, seeded
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from observed_runs import acting
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor, nn
from toy_models import LitMLP, Remembering, toy_examples, variant

import lightning_spectral as ls
from lightning_spectral.algorithms import FrozenA, MatrixMeans, OrthonormalA, TermMeans
from lightning_spectral.filters.privacy import PrivateEnd, PrivateFit
from lightning_spectral.filters.private_sums import PrivateSums
from lightning_spectral.functional.privacy import calibrated, epsilon
from lightning_spectral.participation.cohorts import ClientDirectory
from lightning_spectral.protocol.per_client import assign
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.protocol.rng import SecretNormals
from lightning_spectral.server.executor import Executor
from lightning_spectral.sums import MeanChange

pytest.importorskip("dp_accounting", reason="epsilon is computed by dp-accounting, of the extra `privacy`")

NUM_CLIENTS, ACTIVE = 12, 4
PRIVACY = ls.ClientPrivacy(clip=0.5, noise_multiplier=1.0, delta=1e-3, noise_seed=1)
PRIVATE: dict[str, Any] = {"filters": [PRIVACY], "participation": ls.Uniform(active=ACTIVE), "clients_per_round": None}
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)
SHARDED = ls.SpectralSharding(ls.TopN(), keep_ratio=0.4, layers=EVERY_LAYER)


# -- epsilon


def gaussian_delta(mean: float, at: float) -> float:
    """The least delta of telling N(mean, 1) from N(0, 1) at an epsilon: Balle & Wang (2018), Theorem 8."""
    return float(norm.cdf(mean / 2 - at / mean) - math.exp(at + norm.logcdf(-mean / 2 - at / mean)))


@pytest.mark.parametrize(("noise", "num_rounds", "delta"), [(5.0, 1, 1e-5), (5.0, 60, 1e-5), (1.0, 3, 1e-3)])
def test_epsilon_with_all_clients_is_that_of_one_gaussian(noise: float, num_rounds: int, delta: float) -> None:
    """T rounds are one of noise z / sqrt(T); up to the rounding of losses, upwards."""
    exact = brentq(lambda at: gaussian_delta(math.sqrt(num_rounds) / noise, at) - delta, 0.0, 200.0)
    assert exact <= epsilon(1.0, noise, num_rounds, delta) <= exact + 1e-3 * num_rounds


def test_epsilon_never_exceeds_that_of_renyi_divergences() -> None:
    """The closed form alpha / (2 z^2) a round, converted as in Mironov (2017), which is a looser bound."""
    orders = np.linspace(1.01, 200, 10_000)
    renyi = float((60 * orders / (2 * 5.0**2) + math.log(1e5) / (orders - 1)).min())
    assert 0.8 * renyi < epsilon(1.0, 5.0, 60, 1e-5) < renyi


@pytest.mark.parametrize("num_rounds", [1, 10])
def test_a_coarser_grid_for_little_noise_costs_little_epsilon(num_rounds: int) -> None:
    """With all clients it has a closed form, whose epsilon is never underestimated."""
    exact = brentq(lambda at: gaussian_delta(math.sqrt(num_rounds) / 0.05, at) - 1e-3, 0.0, 1e5)
    assert exact <= epsilon(1.0, 0.05, num_rounds, 1e-3) <= 1.001 * exact


@pytest.mark.slow
@pytest.mark.parametrize(("target", "least"), [(400.0, 0.09), (4000.0, 0.05)])
def test_noise_for_a_large_budget_is_found_within_seconds(target: float, least: float) -> None:
    began = time.process_time()
    noise = calibrated(0.2, target, 10, 1e-3)
    assert time.process_time() - began < 20.0  # three where this was written, once two minutes
    assert noise == pytest.approx(least, rel=0.01)
    assert epsilon(0.2, noise, 10, 1e-3) <= target


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rate", "noise"), [(0.1, 1.1), (0.3, 0.8)])
def test_epsilon_of_one_round_is_that_of_a_mixture(rate: float, noise: float) -> None:
    """Of (1 - q) N(0, z^2) + q N(1, z^2) against N(0, z^2), both ways, by summing over a fine grid."""
    x = np.linspace(-12 * noise, 1 + 12 * noise, 2_000_001)
    without = norm.pdf(x, 0, noise)
    with_client = (1 - rate) * without + rate * norm.pdf(x, 1, noise)

    def delta(at: float) -> float:
        pairs = (with_client, without), (without, with_client)
        return max(float(np.maximum(p - math.exp(at) * q, 0).sum() * (x[1] - x[0])) for p, q in pairs)

    exact = brentq(lambda at: delta(at) - 1e-5, 0.01, 20.0)
    assert exact - 1e-4 <= epsilon(rate, noise, 1, 1e-5) <= exact + 2e-3


@pytest.mark.parametrize("wrong", [{"rate": 2.0}, {"noise_multiplier": 0.0}, {"num_rounds": 0}, {"delta": 1e3}])
def test_epsilon_of_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be "):
        epsilon(**{"rate": 1.0, "noise_multiplier": 1.0, "num_rounds": 9, "delta": 1e-3, **wrong})


def test_epsilon_is_just_below_the_published_one() -> None:
    """McMahan et al. (2018), Table 1: 763,430 users, 5,000 a round, noise 1.0: 4.634, by looser moments."""
    assert 0.8 * 4.634 < epsilon(5000 / 763_430, 1.0, 5000, 1e-9) < 4.634


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "target", "num_rounds"), [(0.1, 2.0, 60), (1.0, 8.0, 10), (0.25, 50.0, 5)])
def test_the_calibrated_noise_suffices_and_less_does_not(rate: float, target: float, num_rounds: int) -> None:
    noise = calibrated(rate, target, num_rounds, 1e-5)
    assert epsilon(rate, noise, num_rounds, 1e-5) <= target < epsilon(rate, 0.998 * noise, num_rounds, 1e-5)


def test_a_delta_that_no_noise_reaches_is_named() -> None:
    with pytest.raises(ValueError, match="No noise gives an epsilon of 8 with delta=1e-17; raise delta"):
        calibrated(0.2, 8.0, 10, 1e-17)


# -- rounds without a Trainer: clients are functions from what they are sent to what they send back


@dataclass
class Moves(Executor):
    """Clients that add a vector of their own to every tensor that they were sent."""

    by_client: Mapping[int, float]
    names: Sequence[str]

    def run(self, downloads: Iterable[Download]) -> Iterator[Upload]:
        for download in downloads:
            tensors = {name: download.tensors[name] + self.by_client[download.unit.client_id] for name in self.names}
            yield Upload(download.unit, tensors, num_steps=1)


def play(
    by_client: Mapping[int, float],
    privacy: ls.ClientPrivacy,
    module: nn.Module | None = None,
    algorithm: ls.Algorithm | None = None,
    sizes: Sequence[int] = (5,) * NUM_CLIENTS,
    round_idx: int = 0,
    active: float = ACTIVE,
) -> tuple[dict[str, Tensor], float]:
    """Play one private round of the given clients; return what is added to weights, and the next clip."""
    server = seeded(nn.Linear, 3, 2) if module is None else module
    clients = ClientDirectory(torch.tensor(sizes), assign(1.0, len(sizes), 0, "keep ratios"))
    names = list(dict(server.named_parameters()))
    engine = bare_engine(
        ls.FedAvg() if algorithm is None else algorithm,
        server,
        clients,
        lambda _: Moves(by_client, names),
        filters=[privacy],
        active=active,
        absolute=True,
    )
    units = [WorkUnit(client, coefficient=1 / active) for client in by_client]
    engine.open_round(round_idx, units).play(units)
    engine.round.gather()
    summary = engine.apply_round()
    assert summary.clients == () == tuple(summary.logged)
    end: Any = engine.filters["ClientPrivacy"]
    return {name: -p.grad for name, p in server.named_parameters() if p.grad is not None}, end.clip


def as_vector(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors.values()]).double()


def noise_of(privacy: ls.ClientPrivacy, round_idx: int, sizes: Sequence[int], multiplier: float) -> Tensor:
    """The noise that follows from the seed of a test."""
    normals = SecretNormals(round_idx.to_bytes(8, "big") + str(privacy.noise_seed).encode())
    return torch.cat([normals(size) for size in sizes]) * multiplier * privacy.clip / ACTIVE


MOVES = {0: 0.001, 3: -0.02, 5: 4.0, 7: -0.1}


def expected(moves: Mapping[int, float], privacy: ls.ClientPrivacy = PRIVACY, round_idx: int = 0) -> Tensor:
    """Algorithm 1 of McMahan et al. (2018), with the denominator q N: all eight coordinates move alike."""
    total = sum(move * min(1.0, privacy.clip / (abs(move) * math.sqrt(8))) for move in moves.values())
    return total / ACTIVE + noise_of(privacy, round_idx, (6, 2), privacy.noise_multiplier or 0.0)


@pytest.mark.parametrize("moves", [MOVES, {}, {1: 2.0}], ids=["four clients", "nobody", "one"])
def test_a_round_is_that_of_the_paper(moves: Mapping[int, float]) -> None:
    found, _ = play(moves, PRIVACY)
    assert float((as_vector(found) - expected(moves)).abs().max()) < 1e-6


def test_the_clip_approaches_the_quantile_as_published() -> None:
    """Andrew et al. (2021), Algorithm 1: three of four within the bound, the aim is a half, with noise on the votes."""
    found, clip = play(MOVES, replace(PRIVACY, noise_multiplier=0.2, clip_quantile=0.5, clip_rate=0.3))
    votes_noise, multiplier = ACTIVE / 20, (0.2**-2 - (2 * ACTIVE / 20) ** -2) ** -0.5
    normals = SecretNormals((0).to_bytes(8, "big") + b"1")
    noise = [normals(6), normals(2), normals(1)]
    share = (3 - 0.5 * 4 + float(noise[2]) * votes_noise) / ACTIVE + 0.5
    assert clip == pytest.approx(0.5 * math.exp(-0.3 * (min(max(share, 0), 1) - 0.5)), rel=1e-6)
    total = expected(MOVES, replace(PRIVACY, noise_multiplier=0.2)) - noise_of(PRIVACY, 0, (6, 2), 0.2)
    total += torch.cat(noise[:2]) * multiplier * 0.5 / ACTIVE
    assert float((as_vector(found) - total).abs().max()) < 1e-6


# -- five wrong ways, each of which one of the checks catches


def check_buffers_are_not_bare(fit: Fit, data: Any) -> None:
    """A model's running averages are refused, or stay as they are."""
    clients = ls.FederatedDataModule(toy_examples(60), ls.IIDPartitioner(NUM_CLIENTS))
    module = seeded(LitMLP, norm=True)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with suppress(ValueError):  # named by the test of refusals
        fit(module, clients, **PRIVATE)
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())


def check_coordinates_are_independent(fit: Fit, data: Any) -> None:
    found, _ = play({}, PRIVACY)
    assert len(as_vector(found).unique()) == 8


def check_examples_do_not_count(fit: Fit, data: Any) -> None:
    toy = toy_examples(60)
    owners = [0] * 38 + [client for client in range(1, 12) for _ in range(2)]
    uneven = ls.FederatedDataModule(toy, ls.NaturalPartitioner(owners), batch_size=4)
    weights = set[float]()
    watch = acting(on_client_start=lambda trainer, model, turn: weights.add(turn.unit.coefficient))
    fit(seeded(LitMLP), uneven, max_epochs=3, callbacks=[watch], **PRIVATE)
    assert {round(weight, 12) for weight in weights} == {0.25}


def check_divisors_are_fixed(fit: Fit, data: Any) -> None:
    for moves in (MOVES, {1: 2.0}):
        found, _ = play(moves, PRIVACY)
        assert float((as_vector(found) - expected(moves)).abs().max()) < 1e-6


def check_noise_is_new(fit: Fit, data: Any) -> None:
    """In another process that resumes, and in another round."""
    secret = replace(PRIVACY, noise_seed=None)
    found = [as_vector(play({}, secret, round_idx=round_idx)[0]) for round_idx in (0, 0, 1)]
    assert not any(torch.equal(found[i], found[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def once_for_all(self: SecretNormals, size: int, drawn: Callable[..., Tensor] = SecretNormals.__call__) -> Tensor:
    return drawn(self, 1).repeat(size)


def divided_by_reported(mean: MeanChange) -> None:
    mean._absolute = frozenset()


CHECKS = {
    "buffers are bare": (check_buffers_are_not_bare, ls.ClientPrivacy, "server", lambda *given: PrivateEnd(*given)),
    "one number for all coordinates": (check_coordinates_are_independent, SecretNormals, "__call__", once_for_all),
    "weights by examples": (check_examples_do_not_count, Tensor, "sign", lambda sizes: sizes),
    "divided by who reported": (check_divisors_are_fixed, MeanChange, "fix", divided_by_reported),
    "the same noise again": (check_noise_is_new, secrets, "token_bytes", lambda _: b"key"),
}


@pytest.mark.parametrize("wrong", CHECKS)
def test_a_wrong_way_is_caught(wrong: str, fit: Fit, data: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check, owner, name, instead = CHECKS[wrong]
    check(fit, data)
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(AssertionError):
        check(fit, data)


# -- an audit


def audited(noise: float, num_runs: int = 1000) -> float:
    """One round with a planted client that moves as far as it may, and without; nobody else moves."""
    scores: dict[bool, list[float]] = {True: [], False: []}
    for planted in (True, False):
        for run in range(num_runs):
            private = replace(PRIVACY, noise_multiplier=noise, noise_seed=2 * run + planted)
            found, _ = play({1: 0.0, **({0: 100.0} if planted else {})}, private, active=NUM_CLIENTS)
            scores[planted].append(float(as_vector(found).sum()))
    return lower_bound(scores[True], scores[False], PRIVACY.delta)


@pytest.mark.slow
def test_an_audit_finds_no_more_than_is_claimed_and_finds_too_little_noise() -> None:
    claim = epsilon(1.0, 1.0, 1, PRIVACY.delta)
    assert 0.5 < audited(1.0) <= claim
    assert audited(0.1) > claim  # a tenth of the noise


# -- fits


DEVICE = ls.simulation.DeviceProfile(1e6, 1e6, 1e9)
FITTED = {
    "FedAvg": ls.FedAvg(),
    "personal head": ls.FedAvg(),
    "eight bits": ls.FedAvg(),
    "means of terms": replace(SHARDED, aggregation=TermMeans()),
    "means of matrices": replace(SHARDED, aggregation=MatrixMeans()),
    "after a spectral start": SHARDED,
    "all terms": ls.SpectralSharding(keep_ratio=1.0, layers=EVERY_LAYER),
    "LoRA": ls.LoRA(2),
    "LoRA, B alone": ls.LoRA(2, aggregation=FrozenA()),
    "LoRA, orthonormal": ls.LoRA(2, aggregation=OrthonormalA()),
    "LoRA, products": ls.LoRA(2, aggregation=ls.StackedProducts()),
}
BESIDE: dict[str, ls.Filter] = {"personal head": ls.Personal(["net.5.*"]), "eight bits": ls.Int8()}


def options_of(name: str, privacy: ls.ClientPrivacy = PRIVACY) -> dict[str, Any]:
    """Those of one of the fits."""
    return {**PRIVATE, "algorithm": FITTED[name], "filters": [privacy, *([BESIDE[name]] if name in BESIDE else [])]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FITTED)
def test_a_round_has_noise_and_releases_nothing_else(name: str, data: Any, fit: Fit) -> None:
    fitted = fit(seeded(LitMLP), data, max_epochs=2, **options_of(name))
    for row in fitted.rows:
        of_weights = {"fl/terms_visited", "fl/inclusion_entropy", "fl/largest_multiplier"}
        assert row.keys() - of_weights == {"fl/round", "fl/epsilon", "fl/clip", "fl/lr", "val_loss", "val_acc"}
    assert fitted.rows[1]["fl/epsilon"] == epsilon(ACTIVE / NUM_CLIENTS, 1.0, 2, PRIVACY.delta)
    assert fitted.ledger.rows == []
    other = fit(seeded(LitMLP), data, max_epochs=2, **options_of(name, replace(PRIVACY, noise_seed=2)))
    frozen = {"personal head": "net.5.", "LoRA": "bias"}.get(name.partition(",")[0], "nothing")
    trained = {n for n, _ in fitted.module.named_parameters() if frozen not in n}
    assert {n for n in fitted.state if not torch.equal(fitted.state[n], other.state[n])} == trained


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", FITTED)
def test_noise_is_as_large_as_it_says_in_every_number_that_is_summed(
    name: str, fit: Fit, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients that change nothing: sums are the noise alone, and there is some for each number that travels back."""
    found: list[Tensor] = []
    release, uploaded = PrivateSums.release, set[int]()

    def watched(self: PrivateSums, *args: Any) -> None:
        release(self, *args)
        found.extend(mean.change(n).flatten() for mean in self.sums for n in mean.names if n not in mean.counts)

    class Watch(ls.RoundCallback):
        def on_client_end(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
            uploaded.add(sum(tensor.numel() for tensor in turn.upload.tensors.values()))
            assert (turn.upload.num_steps, dict(turn.upload.logged), turn.upload.unreached) == (0, {}, None)

    monkeypatch.setattr(PrivateSums, "release", watched)
    fit(seeded(LitMLP), data, callbacks=[Watch()], local_epochs=0, max_epochs=3, **options_of(name))
    values = torch.cat(found) / (PRIVACY.clip / ACTIVE)
    noise = values[values != 0]
    assert float(noise.square().mean() - 1) ** 2 < 25 * 2 / len(noise)
    if name in ("FedAvg", "personal head", "means of terms", "all terms", "LoRA"):  # others sum other numbers
        assert {len(noise)} == {3 * size for size in uploaded}


@pytest.mark.slow
def test_a_resumed_run_has_the_noise_of_the_seed_and_otherwise_new_noise(data: Any, fit: Fit, tmp_path: Path) -> None:
    adaptive = replace(PRIVACY, noise_multiplier=0.2, clip_quantile=0.5)
    options: dict[str, Any] = {**PRIVATE, "filters": [adaptive], "algorithm": SHARDED}
    check_resumes(fit, LitMLP, data, tmp_path, **options)
    secret = {**options, "filters": [replace(adaptive, noise_seed=None)]}
    whole, again = (fit(seeded(LitMLP), data, max_epochs=2, **secret) for _ in range(2))
    assert not same_state(whole.state, again.state)


@pytest.mark.slow
def test_rounds_keep_the_probability_that_they_had() -> None:
    """If other clients are there after a restart, those of before had no less privacy lost."""
    few = PrivateFit(PRIVACY, 10, 50)
    many = PrivateFit(PRIVACY, 10, 500, before=few.rounds(200))
    assert many.rounds(201) == [(0.2, 1.0, 200), (0.02, 1.0, 1)]
    assert many.epsilon(200) == few.epsilon(200) < many.epsilon(201) < few.epsilon(201)
    assert many.epsilon(201) > 10 * PrivateFit(PRIVACY, 10, 500).epsilon(201)  # as if they had never been fewer
    back = PrivateFit(PRIVACY, 10, 50, before=many.rounds(300))
    assert [count for _, _, count in back.rounds(400)] == [200, 100, 100]
    assert PrivateFit(PRIVACY, 10, 50, before=few.rounds(200)).rounds(210) == few.rounds(210)
    planned = replace(PRIVACY, noise_multiplier=None, target_epsilon=2.0, num_rounds=100)
    assert PrivateFit(planned, 10, 500, before=few.rounds(10)).multiplier == 1.0  # not that of another plan


def test_a_second_fit_of_a_module_adds_to_its_epsilon(data: Any, quiet: dict[str, Any]) -> None:
    """Whether it counts rounds from 0 again, as another Trainer does, or goes on counting."""
    model = ls.FederatedModule(seeded(LitMLP), **PRIVATE)
    first, second = (pl.Trainer(max_epochs=2, callbacks=[ls.RoundHistory()], **quiet) for _ in range(2))
    first.fit(model, data)
    second.fit(model, data)
    second.fit_loop.max_epochs = 3
    second.fit(model, data)
    spent = [epsilon(ACTIVE / NUM_CLIENTS, 1.0, count, PRIVACY.delta) for count in range(1, 6)]
    histories = (next(c for c in one.callbacks if isinstance(c, ls.RoundHistory)) for one in (first, second))
    assert [value for history in histories for value in history.column("fl/epsilon")] == spent


def test_votes_on_the_clip_cost_noise_and_it_says_how_much() -> None:
    voting = replace(PRIVACY, clip_quantile=0.5, noise_seed=None)
    assert str(PrivateFit(voting, 50, 500)).startswith("privacy: noise of 1.021 times the clip")
    with pytest.warns(
        ls.SpectralWarning, match="12 clients a round.* 1.81 times the clip instead of 1.*Raise `active`"
    ):
        assert PrivateFit(voting, 12, 500).sum_multiplier == pytest.approx((1 - (2 * 12 / 20) ** -2) ** -0.5)


def test_a_client_leaves_nothing_behind_for_others(data: Any, fit: Fit) -> None:
    remembers = variant(  # in an attribute that is too large to be put back
        LitMLP,
        lambda lit: setattr(lit, "memory", torch.zeros(2**20 + 1)),
        before_step=lambda lit, batch: lit.memory.add_(1),
    )
    with pytest.raises(ValueError, match=r"memory is too large to be put back.* register it as a buffer"):
        fit(seeded(remembers), data, **PRIVATE)


def test_mistakes_in_the_users_code_are_named_as_without_privacy(data: Any, fit: Fit) -> None:
    def prepare(lit: Any) -> None:
        lit.net.insert(2, nn.BatchNorm1d(12))
        lit.seen = 0

    counts = variant(LitMLP, prepare, before_step=lambda lit, batch: setattr(lit, "seen", lit.seen + 1))
    with pytest.warns(ls.SpectralWarning) as said:
        fit(seeded(counts), data, max_epochs=1, buffers={"*": "server"}, **PRIVATE)
    put_back, averages = sorted(str(each.message) for each in said if each.category is ls.SpectralWarning)
    assert "clients change `seen`, which are neither parameters nor buffers" in put_back
    assert "running averages of net.2 are still 0 and 1" in averages


@pytest.mark.slow
def test_a_fit_ends_before_it_exceeds_its_budget(data: Any, fit: Fit, tmp_path: Path) -> None:
    """Also if it is resumed; and with a number of rounds, the noise is such that these spend it."""
    budget = epsilon(ACTIVE / NUM_CLIENTS, 1.0, 3, PRIVACY.delta)
    limited = {**PRIVATE, "filters": [replace(PRIVACY, target_epsilon=1.01 * budget)]}
    fitted = fit(seeded(LitMLP), data, max_epochs=9, **limited)
    assert [row["fl/round"] for row in fitted.rows] == [0, 1, 2]
    fitted.trainer.save_checkpoint(tmp_path / "3.ckpt")
    with pytest.raises(ls.errors.RoundError, match="Round 3 would exceed target_epsilon"):
        fit(seeded(LitMLP), data, max_epochs=9, ckpt_path=tmp_path / "3.ckpt", **limited)
    planned = replace(PRIVACY, noise_multiplier=None, target_epsilon=budget, num_rounds=3)
    fitted = fit(seeded(LitMLP), data, max_epochs=9, **{**PRIVATE, "filters": [planned]})
    assert len(fitted.rows) == 3
    assert 0.99 * budget < fitted.rows[-1]["fl/epsilon"] <= budget


def test_a_round_without_clients_has_noise_too(data: Any, fit: Fit) -> None:
    """Otherwise weights that stay the same would say that nobody took part."""
    rare = {**PRIVATE, "filters": [replace(PRIVACY, noise_multiplier=0.1)], "participation": ls.Uniform(active=1)}
    drawn = list[int]()
    watch = acting(on_client_start=lambda trainer, model, turn: drawn.append(turn.unit.client_id))
    module = seeded(LitMLP)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fitted = fit(module, data, seed=2, callbacks=[watch], **rare)
    assert not drawn, "another seed is needed"
    assert not any(torch.equal(fitted.state[name], before[name]) for name in before)


def test_lost_clients_count_for_nothing(data: Any, fit: Fit) -> None:
    """A client that drops out or fails leaves no trace: not in logs, nor in what others weigh."""
    lost = fit(seeded(LitMLP), data, dropout=ls.ClientDropout(0.5), max_epochs=2, **PRIVATE)
    assert lost.rows[0].keys() == {"fl/round", "fl/epsilon", "fl/clip", "fl/lr", "val_loss", "val_acc"}


def broken(kind: str) -> Callable[[Any, Any], None]:
    """What goes wrong in a step on one client's data."""

    def before_step(lit: Any, batch: Any) -> None:
        if bool((batch[0][:, 0] == MARK).any()):
            if kind == "label":
                batch[1].fill_(99)
            elif kind == "nan":
                batch[0].fill_(math.nan)
            else:
                raise ZeroDivisionError("only here")

    return before_step


MARK = 12.5


@pytest.mark.parametrize("kind", ["label", "nan", "error"])
def test_no_client_ends_a_run_or_is_named_whatever_its_data(kind: str, fit: Fit) -> None:
    """Without privacy, the same client ends it."""
    toy = toy_examples()
    toy.tensors[0][:10, 0] = MARK
    marked = ls.FederatedDataModule(toy, ls.NaturalPartitioner(torch.arange(120) // 10), batch_size=4)
    everyone = {**PRIVATE, "participation": ls.Uniform(active=NUM_CLIENTS)}
    lit = variant(LitMLP, before_step=broken(kind))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ls.SpectralWarning)
        assert len(fit(seeded(lit), marked, max_epochs=2, **everyone).rows) == 2
    if kind != "nan":
        with pytest.raises(ls.ClientError):
            fit(seeded(lit), marked, clients_per_round=NUM_CLIENTS)


def test_a_program_that_fails_on_all_clients_is_not_trained_in_silence(data: Any, fit: Fit) -> None:
    def fails(lit: Any, batch: Any) -> None:
        raise ZeroDivisionError("everywhere")

    everyone = {**PRIVATE, "participation": ls.Uniform(active=NUM_CLIENTS)}
    with pytest.warns(ls.SpectralWarning, match="training fails on every client, so only noise is added"):
        fit(seeded(variant(LitMLP, before_step=fails)), data, **everyone)


@pytest.mark.parametrize(
    ("faults", "named"),
    [
        (ls.Faults(), r"on_error=Raise\(\)"),
        (
            replace(ls.server.fault_policy.FORGIVING, on_late=ls.LeaveOut(0.5)),
            r"on_late=LeaveOut\(max_share=0.5",
        ),
    ],
)
def test_faults_that_would_end_a_private_run_are_refused(faults: Any, named: str) -> None:
    with pytest.raises(ValueError, match=rf"must not end it, whatever its data; `Faults\({named}"):
        ls.FederatedModule(LitMLP(), faults=faults, filters=[PRIVACY], participation=ls.Uniform(active=4))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda lit: lit.logger.log_metrics({"secret": 1.0}), "cannot use `logger.log_metrics`"),
        (lambda lit: lit.trainer.loggers[0].experiment, "cannot use `logger.experiment`"),
        (lambda lit: setattr(lit.trainer, "should_stop", True), "cannot end it by `trainer.should_stop`"),
    ],
)
def test_a_client_neither_logs_by_itself_nor_stops_the_run(
    act: Any, message: str, data: Any, fit: Fit, tmp_path: Path
) -> None:
    said: list[str] = []

    def acts(lit: Any, batch: Any) -> None:
        try:
            act(lit)
        except (AttributeError, ValueError) as error:
            said.append(str(error))

    logger = CSVLogger(tmp_path)
    fit(seeded(variant(LitMLP, before_step=acts)), data, max_epochs=2, trainer={"logger": logger}, **PRIVATE)
    assert said
    assert all(message in one for one in said)
    assert "secret" not in (Path(logger.log_dir) / "metrics.csv").read_text()
    act_alone = fit(seeded(variant(LitMLP, before_step=lambda lit, batch: act(lit))), data, trainer={"logger": logger})
    assert act_alone.rows, "without privacy it may"


OWN = type("Own", (ls.FedAvg,), {})  # might sum anything
Traced = variant(LitMLP, example_input_array=torch.zeros(2, 6))
SAME_TERMS = r"SpectralSharding does not promise: give all clients the same terms, SpectralSharding\(TopN"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a fixed cohort": ({"participation": None, "clients_per_round": 4}, "participation=Uniform"),
    "a sampler by losses": (
        {"participation": ls.LossVarianceReduced(active=4)},
        "hides the losses and updates of single clients, by which LossVarianceReduced draws them; use .*Uniform",
    ),
    "a design": ({"participation": ls.Uniform(active=4, design=ls.Systematic())}, "without `design`"),
    "a mean of who is there": ({"participation": ls.Uniform(active=4, normalize=True)}, "without `design` and `norm"),
    "everyone, by examples": ({"participation": ls.FullParticipation()}, "participation=Uniform"),
    "terms that are drawn": ({"algorithm": ls.SpectralSharding()}, SAME_TERMS),
    "two keep ratios": ({"algorithm": replace(SHARDED, keep_ratio={0.2: 0.5, 0.4: 0.5})}, SAME_TERMS),
    "two ranks": ({"algorithm": ls.LoRA({1: 0.5, 2: 0.5})}, "use adapters of one rank"),
    "products that are factorised": ({"algorithm": ls.LoRA(2, aggregation=ls.TruncatedProducts())}, "are summed"),
    "bits": ({"algorithm": ls.Zampling(degree=2)}, "Zampling does not promise"),
    "stores of clients": ({"algorithm": ls.StaleUpdates()}, "StaleUpdates does not promise"),
    "control variates": ({"algorithm": ls.Scaffold()}, "Scaffold does not promise"),
    "channels": ({"algorithm": ls.WidthSharding(keep_ratio=0.5), "module": Traced}, "WidthSharding does not promise"),
    "what a client remembers": ({"algorithm": Remembering()}, "Remembering does not promise"),
    "a subclass": ({"algorithm": OWN()}, r"Own does not promise: .* let Own say so: `promises = Promises\(noise_hides"),
    "clients' evaluation": ({"callbacks": [ls.ClientEvaluation()]}, "hides single clients, and ClientEvaluation reads"),
    "clients' tables": ({"callbacks": [ls.RoundDashboard()]}, "RoundDashboard shows clients' data without noise"),
    "alignment": (
        {"callbacks": [ls.plugin.callbacks.UpdateAlignment()]},
        "hides single clients, and UpdateAlignment reads",
    ),
    "first come": (
        {"clock": ls.VirtualClock([ls.simulation.DeviceProfile(1e6, 1e6, 1e9)] * 12, keep_first=3)},
        "keep_first",
    ),
    "averages of data": (
        {"algorithm": ls.FedAvg(), "module": partial(LitMLP, norm=True)},
        "clients would send back the buffers net.1.run",
    ),
    "few for votes": ({"filters": [replace(PRIVACY, clip_quantile=0.5)]}, "raise `active`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_noise_would_not_hide_is_refused(name: str, data: Any, fit: Fit) -> None:
    options, message = REFUSED[name]
    options = {**PRIVATE, **options}
    with pytest.raises(ValueError, match=message):
        fit(seeded(options.pop("module", LitMLP)), data, **options)


def test_callbacks_that_wait_for_a_loss_are_told_that_there_is_none(data: Any, fit: Fit) -> None:
    def on_plateau(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "fl/loss"}}

    with pytest.raises(ValueError, match="monitors 'fl/loss', which was not logged"):
        fit(seeded(variant(LitMLP, configure_optimizers=on_plateau)), data, **PRIVATE)
    with pytest.raises(RuntimeError, match="fl/loss"):
        fit(seeded(LitMLP), data, callbacks=[EarlyStopping("fl/loss")], **PRIVATE)


def test_one_of_several_models_has_no_privacy() -> None:
    """The sampling of several models weighs clients, and its probabilities are not those of one model."""
    member = ls.FederatedModule(LitMLP(), filters=[PRIVACY])
    with pytest.raises(ValueError, match="ClientPrivacy needs clients that weigh the same, and clients of 'words'"):
        ls.MultiModelModule({"words": member}, participation=ls.Uniform(active=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 2000.0}, "`clip` must be in"),
        ({"noise_multiplier": 0.0}, "`noise_multiplier` must be at least 0.05"),
        ({"noise_multiplier": None}, "needs `noise_multiplier`, or `num_rounds`"),
        ({"num_rounds": 3}, "and not both"),
        ({"noise_multiplier": None, "num_rounds": 3}, "give `target_epsilon`"),
    ],
)
def test_wrong_numbers_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PRIVACY, **options)


def test_a_delta_that_allows_to_publish_a_client_is_named(data: Any, fit: Fit) -> None:
    told = said_during(partial(fit, seeded(LitMLP), data, **{**PRIVATE, "filters": [replace(PRIVACY, delta=0.1)]}))
    assert any("`delta=0.1` is at least one over the 12 clients" in sentence for sentence in told)


def test_loggers_do_not_learn_the_number_of_examples(data: Any, quiet: Any) -> None:
    trainer = pl.Trainer(max_epochs=1, num_sanity_val_steps=0, **quiet)
    model = ls.FederatedModule(seeded(LitMLP), **{n: PRIVATE[n] for n in ("filters", "participation")})
    trainer.fit(model, data)
    shown: dict[str, Any] = {}
    watch = acting(on_train_start=lambda trainer, model: shown.update(model.hparams_initial))
    pl.Trainer(max_epochs=1, num_sanity_val_steps=0, callbacks=[watch], **quiet).fit(model, data)
    assert "batch_size" in shown["data"]
    assert "num_examples" not in shown["data"]
