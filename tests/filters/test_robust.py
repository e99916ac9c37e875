"""Robust means: against NumPy, with clients that lie, in one process and in two, and where clients hold parts."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import Fit, same_state, seeded
from scipy.optimize import minimize
from torch import nn
from toy_models import LitNet, toy_examples

import lightning_spectral as ls
from lightning_spectral.errors import RoundError, SpectralWarning
from lightning_spectral.filters import DeviceEnd, Filter, Robust
from lightning_spectral.filters.robust import AttackEnd
from lightning_spectral.filters.robust_rules import Changes
from lightning_spectral.server import GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from lightning_spectral.testing import check_filter

RULES: list[Any] = [Median(), TrimmedMean(0.25), GeometricMedian(), Krum(3), MultiKrum(3)]
SYSTEMS = {
    "FedAvg": ls.FedAvg(),
    "sharding": ls.SpectralSharding.published(ls.Unbiased(), keep_ratio={0.4: 0.5, 0.8: 0.5}),
    "width": ls.WidthSharding(ls.RandomChannels(), keep_ratio={0.5: 0.5, 1.0: 0.5}),
    "LoRA": ls.LoRA({1: 0.5, 3: 0.5}),
}
HELD_BY_MANY = {**SYSTEMS, "LoRA": ls.LoRA(3)}  # no rule helps where a liar is one of two that hold a term


def points(seed: int, clients: int = 9, size: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(clients, size))


def changes(values: np.ndarray) -> Changes:
    """Two tensors for each client, in shapes of their own."""
    rows = [{"a": torch.tensor(row[:2]).view(2, 1), "b": torch.tensor(row[2:])} for row in values]
    return Changes(rows, [{}] * len(rows))


def flat(passed: Any) -> np.ndarray:
    return np.concatenate([passed["a"].numpy().ravel(), passed["b"].numpy().ravel()])


def krum_order(values: np.ndarray, num_liars: int) -> list[int]:
    """Clients by score, as in the paper: the sum of the squared distances from the n - f - 2 nearest others."""
    scores = []
    for i in range(len(values)):
        squares = sorted(float(((values[i] - values[j]) ** 2).sum()) for j in range(len(values)) if j != i)
        scores.append(sum(squares[: len(values) - num_liars - 2]))
    return sorted(range(len(values)), key=lambda i: (scores[i], i))


@pytest.mark.parametrize("clients", [8, 9])
@pytest.mark.parametrize("seed", range(3))
class TestAgainstNumPy:
    def test_the_median_is_that_of_every_entry(self, seed: int, clients: int) -> None:
        values = points(seed, clients)
        for passed in Median().passed_on(changes(values)):
            np.testing.assert_allclose(flat(passed), np.median(values, axis=0), rtol=1e-12)

    @pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.4])
    def test_the_trimmed_mean_leaves_out_the_ends_of_every_entry(self, share: float, seed: int, clients: int) -> None:
        values = points(seed, clients)
        cut = int(share * clients + 1e-9)
        expected = np.sort(values, axis=0)[cut : clients - cut].mean(axis=0)
        np.testing.assert_allclose(flat(TrimmedMean(share).passed_on(changes(values))[0]), expected, rtol=1e-12)

    def test_the_geometric_median_has_the_least_sum_of_distances(self, seed: int, clients: int) -> None:
        values = points(seed, clients)
        found = flat(GeometricMedian().passed_on(changes(values))[0])

        def total(center: np.ndarray) -> float:
            return float(np.linalg.norm(values - center, axis=1).sum())

        best = minimize(total, np.median(values, axis=0), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
        assert total(found) <= best.fun * (1 + 1e-7)

    @pytest.mark.parametrize("num_liars", [1, 3])
    def test_krum_chooses_the_update_nearest_to_its_neighbours(self, num_liars: int, seed: int, clients: int) -> None:
        values = points(seed, clients)
        order = krum_order(values, num_liars)
        one, several = (rule.passed_on(changes(values)) for rule in (Krum(num_liars), MultiKrum(num_liars)))
        assert [client for client, own in enumerate(one) if own is not None] == order[:1]
        assert {client for client, own in enumerate(several) if own is not None} == {*order[: clients - num_liars]}


def test_entries_are_compared_among_the_clients_that_hold_them() -> None:
    generator = torch.Generator().manual_seed(0)
    whole, clients = 7, 6
    held = [torch.randperm(whole, generator=generator)[:4].sort().values for _ in range(clients)]
    values = [torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(clients)]
    passed = Median().passed_on(Changes([{"w": value} for value in values], [{"w": places} for places in held]))
    for place in range(whole):
        having = [(c, int((held[c] == place).nonzero())) for c in range(clients) if bool((held[c] == place).any())]
        expected = np.median([float(values[c][i]) for c, i in having]) if having else None
        for client, index in having:
            assert float(passed[client]["w"][index]) == pytest.approx(expected, rel=1e-12)


def test_distances_of_parts_are_those_over_what_both_hold() -> None:
    """Three clients agree where they meet, and a fourth is elsewhere, however little it holds."""
    values = [torch.zeros(4), torch.zeros(2), torch.zeros(3), torch.full((1,), 9.0)]
    places = [torch.arange(4), torch.tensor([0, 1]), torch.tensor([1, 2, 3]), torch.tensor([1])]
    own = Changes([{"w": value} for value in values], [{"w": where} for where in places])
    assert [each is not None for each in MultiKrum(1).passed_on(own)] == [True, True, True, False]


@dataclass(frozen=True)
class LyingEnd(DeviceEnd):
    """What some clients send instead of their update: the opposite, many times as long."""

    liars: tuple[int, ...]

    def leave(self, turn: Any, upload: Any) -> Any:
        if upload.left_out is not None or turn.download.unit.client_id not in self.liars:
            return upload, {}
        sent = turn.download.tensors
        lies = {n: sent[n] - 30.0 * (t - sent[n]) if n in sent else t for n, t in upload.tensors.items()}
        return replace(upload, tensors=lies), {}


@dataclass(frozen=True)
class Lies(Filter):
    liars: tuple[int, ...]

    def device(self, half: Any) -> LyingEnd:
        return LyingEnd(self.liars)


def deep() -> LitNet:
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    return LitNet(nn.Sequential(*layers), lr=0.2, example=torch.zeros(2, 6))


def hospital() -> Any:
    return ls.FederatedDataModule(toy_examples(480, seed=3), ls.IIDPartitioner(12), batch_size=8)


def loss_of(module: Any, data: Any) -> float:
    x, y = data.train.tensors
    with torch.no_grad():
        return float(nn.functional.cross_entropy(module(x), y))


def trained(fit: Fit, system: str, filters: list[Any]) -> float:
    data, lit = hospital(), seeded(deep)
    options = {"clients_per_round": 12, "algorithm": HELD_BY_MANY[system], "filters": filters, "max_epochs": 4}
    try:
        return loss_of(fit(lit, data, **options).module, data)
    except RoundError:  # the clients of later rounds diverge
        return math.inf


QUIET = pytest.mark.filterwarnings("ignore::lightning_spectral.errors.SpectralWarning")  # of updates that are too large


@pytest.mark.slow
@QUIET
@pytest.mark.parametrize(("system", "liars"), [(system, liars) for system in SYSTEMS for liars in [(4,), (1, 4, 9)]])
def test_rules_survive_clients_that_lie_and_the_mean_does_not(system: str, liars: tuple[int, ...], fit: Fit) -> None:
    honest = trained(fit, system, [])
    start = loss_of(seeded(deep), hospital())
    assert not trained(fit, system, [Lies(liars)]) < start  # undone, or NaN
    for rule in RULES if system == "FedAvg" else [Median(), MultiKrum(3)]:
        # at least half of what honest clients reach, whatever the lies
        assert trained(fit, system, [Lies(liars), Robust(rule)]) < start - 0.5 * (start - honest), rule


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("system", "rule"),
    [*[("FedAvg", rule) for rule in (*RULES[:3], Krum(1))], *((name, MultiKrum(1)) for name in SYSTEMS)],
)
def test_rules_keep_the_contract_of_filters(system: str, rule: Any) -> None:
    """In one process and two, resumed, in any order, on devices that share nothing with the server."""
    check_filter(Robust(rule), seeded(deep), toy_examples(8).tensors, algorithm=SYSTEMS[system])


class TestMistakes:
    def build(self, *filters: Any, **options: Any) -> Any:
        return ls.FederatedModule(seeded(deep), filters=list(filters), **{"clients_per_round": 4, **options})

    def test_a_rule_needs_enough_clients(self) -> None:
        with pytest.raises(ValueError, match="needs at least 5 clients a round, got clients_per_round=4"):
            self.build(Robust(Krum(2)))

    def test_extremes_are_refused(self, fit: Fit) -> None:
        lit = seeded(deep)
        lit.register_buffer("low", torch.tensor(torch.inf))
        with pytest.raises(ValueError, match="Robust does not protect smallest and largest values, which low"):
            fit(lit, hospital(), filters=[Robust(Median())])

    def test_too_few_updates_leave_the_weights_as_they_are(self, fit: Fit) -> None:
        options = {"filters": [Robust(Krum(1))], "dropout": ls.ClientDropout(0.5), "seed": 4}
        with pytest.warns(SpectralWarning, match=r"Krum\(num_liars=1\) needs at least 4 updates, and [123] arrived"):
            fitted = fit(seeded(deep), hospital(), max_epochs=2, **options)
        assert same_state(fitted.state, seeded(deep).state_dict())


def test_chosen_updates_are_counted(fit: Fit) -> None:
    fitted = fit(seeded(deep), hospital(), filters=[Robust(MultiKrum(1))], clients_per_round=6)
    assert fitted.history.rows[-1]["fl/updates_used"] == 5


ATTACKS = [ls.Attack("noise", 0.5, [1, 3]), ls.Attack("scale", -1.0, 0.3), ls.Attack("alie", 1.5, [0])]
KEYS = [(client, "") for client in range(9)]


def opened(seed: int = 5, round_idx: int = 2) -> Any:
    return SimpleNamespace(round=None, cohort=SimpleNamespace(seed=seed, round_idx=round_idx))


def lies(attack: ls.Attack, own: Changes, keys: Any = KEYS, num_clients: int = 9) -> list[dict[str, Any]]:
    end = AttackEnd(attack, num_clients)
    end.begin(opened())
    return list(end.passed_on(keys, own))


@pytest.mark.parametrize(
    ("lie", "formula"),
    [
        ("scale", lambda own, honest: -3.0 * own),
        ("alie", lambda own, honest: honest.mean(0) + 3.0 * np.sqrt(((honest - honest.mean(0)) ** 2).mean(0))),
        ("ipm", lambda own, honest: 3.0 * honest.mean(0)),
    ],
)
def test_liars_send_what_the_formula_says_and_others_their_own(lie: Any, formula: Any) -> None:
    values = points(3)
    found = lies(ls.Attack(lie, -3.0, [2, 7]), changes(values))
    honest = np.delete(values, [2, 7], axis=0)
    for client in range(9):
        if client in (2, 7):
            assert flat(found[client]) == pytest.approx(formula(values[client], honest), rel=1e-12)
        else:
            assert found[client] == {}


def test_noise_has_its_standard_deviation_and_is_new_in_each_round() -> None:
    values = points(4, clients=3, size=20_002)
    found = flat(lies(ls.Attack("noise", 0.5, [1]), changes(values), KEYS[:3])[1]) - values[1]
    assert abs(found.std() - 0.5) <= 5 * 0.5 / math.sqrt(2 * len(found))
    assert abs(found.mean()) <= 5 * 0.5 / math.sqrt(len(found))
    assert abs(np.corrcoef(found, values[1])[0, 1]) <= 5 / math.sqrt(len(found))
    end = AttackEnd(ls.Attack("noise", 0.5, [1]), 3)
    end.begin(opened(round_idx=3))
    assert not np.allclose(flat(end.passed_on(KEYS[:3], changes(values))[1]) - values[1], found)


def test_of_parts_the_mean_is_that_of_the_honest_holders() -> None:
    rows = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([5.0])}, {"w": torch.tensor([9.0])}]
    own = Changes(rows, [{}, {"w": torch.tensor([1])}, {"w": torch.tensor([0])}])
    assert lies(ls.Attack("ipm", 1.0, [2]), own, KEYS[:3])[2]["w"].tolist() == [-1.0]
    assert lies(ls.Attack("ipm", 1.0, [0]), own, KEYS[:3])[0]["w"].tolist() == [-9.0, -5.0]


def test_a_share_of_liars_is_exact_and_drawn_from_the_seed() -> None:
    ids = [client for client, told in enumerate(lies(ls.Attack("scale", 0.0, 0.3), changes(points(0)))) if told]
    assert len(ids) == 3
    again = [client for client, told in enumerate(lies(ls.Attack("ipm", 0.0, 0.3), changes(points(1)))) if told]
    assert ids == again


def test_all_signs_flipped_undo_a_round_and_krum_does_not_see_one_liar(fit: Fit) -> None:
    def moved(*filters: Any) -> torch.Tensor:
        before = nn.utils.parameters_to_vector(seeded(deep).parameters()).detach()
        return fit(seeded(deep), hospital(), filters=filters, clients_per_round=12).weights - before

    assert torch.allclose(moved(ls.Attack("scale", -1.0, 1.0)), -moved(), atol=1e-6)
    one = moved(Robust(Krum(1)))
    assert moved(Robust(Krum(1)), ls.Attack("scale", 1e3, [2])).norm() < 2 * one.norm()
    assert moved(ls.Attack("scale", 1e3, [2])).norm() > 20 * one.norm()
    with pytest.raises(ls.errors.RoundError, match=r"Round 0, client 2, which AttackEnd has let pass: .* after"):
        moved(ls.Attack("scale", 1e30, [2]))


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "system"), [(each, system) for each in ATTACKS for system in SYSTEMS])
def test_attacks_keep_the_contract_of_filters(attack: Any, system: str) -> None:
    check_filter(attack, seeded(deep), toy_examples(8).tensors, algorithm=SYSTEMS[system], rests=attack.lie != "noise")


def test_attacks_that_mean_nothing_are_refused(fit: Fit) -> None:
    attack = ls.Attack("scale", -1.0, 0.3)
    for filters, said in [
        ([attack, Robust(Median())], "Attack must be the last filter; put Robust before it"),
        ([ls.SecureSums(), attack], "Attack reads the updates of single clients, which SecureSums hides"),
        ([ls.TopK(0.1), attack], "TopK packs what Attack reads"),
    ]:
        with pytest.raises(ValueError, match=said):
            ls.FederatedModule(seeded(deep), filters=filters, clients_per_round=4)
    with pytest.raises(ValueError, match="which Zampling does not promise"):
        ls.FederatedModule(seeded(deep), algorithm=ls.Zampling(), filters=[attack], clients_per_round=4)
    with pytest.raises(ValueError, match="`clients` must be below their number 12, got 12"):
        fit(seeded(deep), hospital(), filters=[ls.Attack("ipm", 1.0, [12])])
