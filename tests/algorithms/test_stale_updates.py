"""Stale updates against slow tables, over all possible cohorts, and in runs."""

from functools import partial
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from direct_rounds import DirectRounds, Tensors, assert_close
from federation import Fit, same_state, seeded
from observed_runs import acting
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.algorithms.memory.kept import compress, restore
from lightning_spectral.algorithms.memory.stale_updates import SEEN
from lightning_spectral.protocol.exchange import update_norm
from lightning_spectral.protocol.records import Download, Upload, WorkUnit
from lightning_spectral.protocol.rng import derived_generator

SHARES = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4}
PROBS = {0: 0.3, 1: 0.9, 2: 0.5, 3: 0.7}
COEFFICIENTS = {client: SHARES[client] / PROBS[client] for client in SHARES}  # those of an unbiased sampler
COHORTS = [(1, 3), (0,), (0, 1, 2), (3,), (2, 3), (1,), (0, 3)]
VARIANTS = {
    "FedVARP": ls.StaleUpdates(),
    "FedStale": ls.StaleUpdates(beta=0.3),
    "MIFA": ls.StaleUpdates.mifa(),
    "MIFA, unseen clients as the others": ls.StaleUpdates(coefficients="data", unseen="mean"),
    "FedStale, unseen clients as the others": ls.StaleUpdates(beta=0.6, unseen="mean"),
    "one term": ls.StaleUpdates(num_terms=1),
}


def network() -> nn.Module:
    """Weights, a bias, and buffers; all float64."""
    return seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))).double()


def train(download: Download) -> Upload:
    """Shrinks parameters and adds noise that is the client's own in each round."""
    generator = derived_generator(0, "noise", *download.ids)
    after = {
        name: 0.9 * tensor + torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype).abs()
        for name, tensor in download.tensors.items()
        if tensor.is_floating_point()
    }
    return Upload(download.unit, after, num_steps=1)


def remember(uploads: dict[int, Tensors], download: Download) -> Upload:
    upload = train(download)
    uploads[download.unit.client_id] = upload.tensors
    return upload


def truncated(change: Tensor, num_terms: int | None) -> Tensor:
    """The slow way: a full decomposition with all other singular values zero."""
    if num_terms is None or change.ndim < 2:
        return change
    U, s, Vh = torch.linalg.svd(change, full_matrices=False)
    return U[:, :num_terms] @ torch.diag(s[:num_terms]) @ Vh[:num_terms]


class SlowTable:
    """A table with a row for every client, all of which are read in every round."""

    def __init__(self, algorithm: ls.StaleUpdates) -> None:
        self.algorithm = algorithm
        self.table: dict[int, dict[str, Tensor]] = {}

    def stale(self, client: int, name: str, like: Tensor) -> Tensor:
        if client in self.table:
            return self.table[client][name]
        if self.algorithm.unseen == "zero" or not self.table:
            return torch.zeros_like(like)
        seen = sum(SHARES[other] for other in self.table)
        return sum(SHARES[other] / seen * self.table[other][name] for other in self.table)

    def step(self, before: Tensors, uploads: dict[int, Tensors], absolute: bool) -> dict[str, Tensor]:
        """New weights: the formula, client by client."""
        weights = {client: COEFFICIENTS[client] for client in uploads}
        summed = sum(weights.values())
        if self.algorithm.coefficients == "data":
            weights = {client: SHARES[client] for client in uploads}
        elif not absolute:
            weights = {client: weight / summed for client, weight in weights.items()}
        after = {}
        for name, x in before.items():
            changes = {client: upload[name] - x for client, upload in uploads.items()}
            if "running" in name:
                total = sum(weights.values())
                after[name] = x + sum(weights[client] / total * change for client, change in changes.items())
                continue
            beta = self.algorithm.beta
            after[name] = x + beta * sum(SHARES[client] * self.stale(client, name, x) for client in SHARES)
            for client, change in changes.items():
                after[name] = after[name] + weights[client] * (change - beta * self.stale(client, name, x))
        for client, upload in uploads.items():
            update = {name: upload[name] - x for name, x in before.items()}
            self.table[client] = {n: truncated(change, self.algorithm.num_terms) for n, change in update.items()}
        return after


@pytest.mark.parametrize("absolute", [True, False], ids=["sampled", "uniform"])
@pytest.mark.parametrize("name", VARIANTS)
def test_rounds_are_those_of_a_table_of_all_clients(name: str, absolute: bool) -> None:
    rounds, slow = DirectRounds(VARIANTS[name], network(), SHARES, absolute), SlowTable(VARIANTS[name])
    for cohort in COHORTS:
        before, uploads = rounds.weights(), {}
        rounds.play({client: COEFFICIENTS[client] for client in cohort}, partial(remember, uploads))
        assert_close(rounds.weights(), slow.step(before, uploads, absolute), 1e-12)


def filled(algorithm: ls.StaleUpdates, seen: tuple[int, ...] = (0, 1, 2, 3)) -> DirectRounds:
    """A federation whose table holds random updates."""
    rounds = DirectRounds(algorithm, network(), SHARES)
    rounds.gradients({client: COEFFICIENTS[client] for client in seen}, train)
    return rounds


def expectation(rounds: DirectRounds) -> Tensors:
    """The mean pseudo-gradient over all cohorts, each with its probability, including the empty one."""
    expected: dict[str, Tensor] = {}
    for drawn in product((True, False), repeat=len(PROBS)):
        prob = prod(p if d else 1 - p for p, d in zip(PROBS.values(), drawn, strict=True))
        cohort = {client: COEFFICIENTS[client] for client, d in zip(PROBS, drawn, strict=True) if d}
        for name, gradient in rounds.copy().gradients(cohort, train).items():
            expected[name] = expected.get(name, 0.0) + prob * gradient
    return expected


def full_participation(rounds: DirectRounds) -> Tensors:
    """The pseudo-gradient if everyone takes part in plain federated averaging, weighted by data."""
    everyone = DirectRounds(ls.FedAvg(), rounds.server, SHARES, round_idx=rounds.round_idx).copy()
    return everyone.gradients(SHARES, train)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_terms", [None, 1])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("unseen", "seen"), [("zero", (0, 1, 2, 3)), ("zero", (1, 3)), ("mean", (1, 3)), ("mean", ())])
def test_the_step_is_unbiased_whatever_the_table_holds(
    unseen: Any, seen: tuple[int, ...], beta: float, num_terms: int | None
) -> None:
    rounds = filled(ls.StaleUpdates(beta=beta, unseen=unseen, num_terms=num_terms), seen)
    assert_close(expectation(rounds), full_participation(rounds), 1e-12)


def test_mifa_is_biased() -> None:
    """Otherwise the test above would show nothing."""
    rounds = filled(ls.StaleUpdates.mifa())
    differences = [
        float((ours - theirs).abs().max())
        for ours, theirs in zip(expectation(rounds).values(), full_participation(rounds).values(), strict=True)
    ]
    assert min(differences) > 1e-2


def test_a_table_that_foresees_the_updates_leaves_no_variance() -> None:
    rounds = filled(ls.StaleUpdates())

    def again(download: Download) -> Upload:
        """Every client moves as it did before."""
        stale = rounds.store[download.unit]
        return Upload(download.unit, {n: t + stale.get(n, 0.0) for n, t in download.tensors.items() if "num" not in n})

    steps = [rounds.copy().gradients({c: COEFFICIENTS[c] for c in cohort}, again) for cohort in ((0,), (1, 2), (3,))]
    for step in steps:
        assert_close(step, steps[0])


def test_the_sum_over_all_clients_is_that_of_the_table_after_many_rounds() -> None:
    rounds = DirectRounds(ls.StaleUpdates(num_terms=2), network(), SHARES)
    for round_idx in range(60):
        cohort = COHORTS[round_idx % len(COHORTS)]
        rounds.play({client: COEFFICIENTS[client] for client in cohort}, train, left_out=cohort[2:])
    pieces = rounds.state.pieces()
    assert float(pieces.pop(SEEN)) == pytest.approx(1.0, abs=1e-15)
    like = {name: p for name, p in rounds.server.named_parameters()}
    table = {unit.client_id: restore(rounds.store[unit], like) for unit in rounds.open(SHARES)[1]}
    assert_close(pieces, {name: sum(SHARES[c] * table[c][name] for c in SHARES) for name in like}, 1e-12)


def test_the_expected_update_is_the_stale_one_even_after_the_client_has_trained() -> None:
    rounds = filled(ls.StaleUpdates(beta=0.5), seen=(0, 1))
    opened, units = rounds.open(COEFFICIENTS)
    stale = {unit: rounds.store[unit] for unit in units if unit.client_id < 2}
    for unit in units:
        download, receipt = opened.send(unit)
        upload = train(download)
        opened.add(receipt, upload)
        expected = opened.expected_update(unit)
        for name, _ in rounds.server.named_parameters():
            assert torch.equal(expected[name], 0.5 * stale[unit][name] if unit in stale else expected[name] * 0)
        assert update_norm(download.tensors, upload.tensors, expected) > 0.1


def test_a_client_left_out_changes_neither_the_table_nor_its_sum() -> None:
    ours, theirs = filled(ls.StaleUpdates()), filled(ls.StaleUpdates())
    ours.play(COEFFICIENTS, train, left_out=(0, 2))
    theirs.play({client: COEFFICIENTS[client] for client in (1, 3)}, train)
    assert_close(ours.state.pieces(), theirs.state.pieces(), 1e-14)
    assert list(ours.store) == list(theirs.store)
    for key in ours.store:
        assert same_state(ours.store[WorkUnit(*key)], theirs.store[WorkUnit(*key)])


def test_a_truncated_entry_is_smaller_and_one_that_would_not_be_is_whole() -> None:
    wide = partial(torch.randn, dtype=torch.float64)  # singular vectors of close values lose digits in float32
    update = {"conv": wide(6, 4, 3, 3), "thin": wide(2, 2), "bias": wide(6)}
    entry = compress(update, num_terms=2)
    assert {name: tuple(t.shape) for name, t in entry.items()} == {
        "conv:u": (6, 2),
        "conv:v": (2, 36),
        "thin": (2, 2),
        "bias": (6,),
    }
    restored = restore(entry, update)
    torch.testing.assert_close(restored["conv"].view(6, 36), truncated(update["conv"].view(6, 36), 2))
    assert torch.equal(restored["thin"], update["thin"])
    zero = {"weight": torch.zeros(4, 4)}
    assert not bool(restore(compress(zero, 1), zero)["weight"].any())


class TestInARun:
    @pytest.fixture
    def fit(self, fit: Fit) -> Fit:
        return partial(fit, clients_per_round=5, max_epochs=3)

    def test_without_beta_it_is_federated_averaging_bit_for_bit(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        ours = fit(seeded(lit_mlp), data, algorithm=ls.StaleUpdates(beta=0.0))
        theirs = fit(seeded(lit_mlp), data)
        assert same_state(ours.state, theirs.state)
        assert ours.ledger.rows == theirs.ledger.rows
        assert not same_state(ours.state, fit(seeded(lit_mlp), data, algorithm=ls.StaleUpdates()).state)

    def test_figures_say_how_full_the_table_is(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        fitted = fit(seeded(lit_mlp), data, algorithm=ls.StaleUpdates())
        clients = [bytes_ / 4 / len(fitted.weights) for bytes_ in fitted.history.column("fl/store_bytes")]
        assert fitted.history.column("fl/stale_share") == pytest.approx([n / 12 for n in clients])
        assert clients[0] == 5
        assert min(fitted.history.column("fl/stale_norm")) > 0

    def test_clients_that_drop_out_are_not_in_the_table(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        seen: set[int] = set()
        note = acting(
            on_round_end=lambda trainer, model, summary: seen.update(
                client.client_id for client in summary.clients if client.left_out is None
            )
        )
        dropout = ls.ClientDropout(0.5)
        fitted = fit(seeded(lit_mlp), data, algorithm=ls.StaleUpdates(), dropout=dropout, callbacks=[note])
        assert 0 < len(seen) < 12
        assert fitted.logged["fl/stale_share"] == pytest.approx(len(seen) / 12)

    def test_the_sum_stays_in_float64_in_a_run_of_half_precision(self, lit_mlp: Any, data: Any, fit: Fit) -> None:
        fitted = fit(seeded(lit_mlp), data, algorithm=ls.StaleUpdates(), trainer={"precision": "bf16-true"})
        assert fitted.model.state.values.dtype == torch.float64
        assert fitted.module.get_parameter("net.0.weight").dtype == torch.bfloat16
        assert fitted.logged["fl/stale_norm"] > 0
