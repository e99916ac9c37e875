"""The virtual clock against hand-computed sums; which clients are late or surplus, and how long a round takes."""

import math
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded

import lightning_spectral as ls
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_seed
from lightning_spectral.simulation import Conditions, SimulatedOutcome, SimulatedRound, SimulatedTask

TASK = SimulatedTask(0.5, num_examples=10, local_epochs=2, num_parameters=100, downlink_bytes=400, uplink_bytes=300)


def device(seconds: float) -> ls.simulation.DeviceProfile:
    """A device that takes ``seconds`` to receive ``TASK`` and no time for anything else."""
    return ls.simulation.DeviceProfile(downlink=400 / seconds, uplink=math.inf, macs_per_second=math.inf)


def units(num_clients: int) -> list[WorkUnit]:
    return [WorkUnit(client_id) for client_id in range(num_clients)]


def simulated(
    seconds: list[float], dropped: list[float] | None = None, task: SimulatedTask = TASK, **options: Any
) -> SimulatedRound:
    """A round of clients that take the given numbers of seconds."""
    clock = ls.VirtualClock([device(s) for s in seconds], **options)
    simulation = Conditions(None if dropped is None else ls.ClientDropout(dropped), clock).prepare(len(seconds), seed=0)
    return simulation.outcomes(0, dict.fromkeys(units(len(seconds)), task))


def left_out(result: SimulatedRound, num_clients: int) -> list[str | None]:
    return [result.outcomes[unit.key].left_out for unit in units(num_clients)]


@pytest.mark.parametrize(
    ("macs", "forward"), [(None, 100), ({0.5: 70.0, 1.0: 90.0}, 70), (lambda keep_ratio: 1000 * keep_ratio, 500)]
)
def test_seconds_are_bytes_over_bandwidth_plus_work_over_speed(macs: Any, forward: int) -> None:
    profile = ls.simulation.DeviceProfile(downlink=200.0, uplink=60.0, macs_per_second=50.0)
    seconds = ls.VirtualClock(profile, macs=macs).seconds(profile, TASK)
    assert seconds == pytest.approx(400 / 200 + 3 * forward * 10 * 2 / 50 + 300 / 60, rel=1e-12)


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    result = simulated([3.0, 1.0, 2.0])
    assert [result.outcomes[unit.key] for unit in units(3)] == [
        SimulatedOutcome(None, seconds) for seconds in (3.0, 1.0, 2.0)
    ]
    assert result.seconds == 3.0


def test_a_client_slower_than_the_deadline_is_late_and_the_server_waits_until_then() -> None:
    result = simulated([3.0, 1.0, 2.0], deadline=2.0)
    assert left_out(result, 3) == ["late", None, None]
    assert result.seconds == 2.0
    assert simulated([1.0, 1.5], deadline=2.0).seconds == 1.5  # all have reported: no wait for the deadline


def test_the_first_to_finish_are_kept() -> None:
    result = simulated([3.0, 1.0, 4.0, 2.0], keep_first=2)
    assert left_out(result, 4) == ["surplus", None, "surplus", None]
    assert result.seconds == 2.0


def test_over_selection_makes_up_for_clients_that_drop_out_or_are_late() -> None:
    result = simulated([3.0, 1.0, 9.0, 2.0, 4.0], dropped=[0, 1, 0, 0, 0], keep_first=2, deadline=5.0)
    assert left_out(result, 5) == [None, "dropped_out", "late", None, "surplus"]
    assert result.seconds == 3.0


def test_the_server_waits_for_missing_clients_until_the_deadline() -> None:
    assert simulated([1.0, 2.0], dropped=[0, 1], deadline=5.0).seconds == 5.0
    assert simulated([1.0, 2.0], dropped=[0, 1]).seconds == 1.0  # without a deadline it knows at once
    assert simulated([1.0, 2.0], dropped=[1, 1]).seconds == 0.0
    assert math.isnan(simulated([1.0, 2.0], dropped=[0, 1]).outcomes[1, ""].seconds)
    no_data = SimulatedTask(0.5, num_examples=0, local_epochs=1)
    assert simulated([1.0, 2.0], task=no_data, deadline=5.0).seconds == 0.0  # a client without data says so at once


def test_the_cost_table_tells_the_clock_the_work(lit: Any, toy: Any, fit: Fit) -> None:
    costs = ls.cost_table(lit, ls.SpectralSharding(), [0.5], torch.zeros(1, 6))
    macs = {ratio: cost.macs for ratio, cost in costs.at.items()}
    work_alone = ls.simulation.DeviceProfile(downlink=math.inf, uplink=math.inf, macs_per_second=1.0)
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), batch_size=4)
    sharding, clock = ls.SpectralSharding(keep_ratio=0.5), ls.VirtualClock(work_alone, macs=macs)
    history = fit(lit, data, algorithm=sharding, clients_per_round=3, local_epochs=2, clock=clock).history
    dense, terms = 6 * 12 + 12 * 3, 6 * (12 + 12)
    assert costs.at[0.5].macs == dense + terms
    assert history.rows[0]["fl/virtual_seconds"] == 3 * (dense + terms) * 10 * 2


@pytest.mark.parametrize("options", [{"keep_first": 3}, {"deadline": 2.5}, {"keep_first": 2, "deadline": 3.0}])
def test_outcomes_do_not_depend_on_the_order_of_clients_or_of_rounds(options: dict[str, Any]) -> None:
    profiles = {device(1.0): 0.25, device(2.0): 0.5, device(3.0): 0.25}
    conditions = Conditions(ls.ClientDropout({0.1: 0.5, 0.5: 0.5}), ls.VirtualClock(profiles, **options))
    one, other = conditions.prepare(8, seed=5), conditions.prepare(8, seed=5)
    forward = [one.outcomes(round_idx, dict.fromkeys(units(8), TASK)) for round_idx in range(20)]
    backward = [other.outcomes(round_idx, dict.fromkeys(units(8)[::-1], TASK)) for round_idx in reversed(range(20))]
    for a, b in zip(forward, reversed(backward), strict=True):
        assert repr(sorted(a.outcomes.items())) == repr(sorted(b.outcomes.items()))  # as text, where NaN equals NaN
        assert a.seconds == b.seconds


@pytest.mark.parametrize("model", ["", "words"])
@pytest.mark.parametrize("seed", [0, 7])
def test_dropout_and_photo_finish_are_drawn_by_seed_round_client_and_model(seed: int, model: str) -> None:
    """With a single model, draws do not involve its name, as before models had names."""
    conditions = Conditions(ls.ClientDropout(0.3), ls.VirtualClock(device(1.0), keep_first=3))
    for round_idx in range(10):
        tasks = dict.fromkeys([WorkUnit(client_id, model, 80.0) for client_id in range(8)], TASK)
        result = conditions.prepare(8, seed).outcomes(round_idx, tasks)
        ids = {client_id: (client_id, model) if model else (client_id,) for client_id in range(8)}
        coins = {c: derived_seed(seed, "client dropout", round_idx, *ids[c]) / 2**63 for c in range(8)}
        finished = [c for c in range(8) if coins[c] >= 0.3]
        finished.sort(key=lambda c: derived_seed(seed, "photo finish", round_idx, *ids[c]))
        reasons = (
            {c: "dropped_out" for c in range(8)} | dict.fromkeys(finished[:3]) | dict.fromkeys(finished[3:], "surplus")
        )
        assert {c: result.outcomes[c, model].left_out for c in range(8)} == reasons


def test_devices_and_dropout_are_shared_out_exactly_and_stay_with_their_clients() -> None:
    clock = ls.VirtualClock({device(9.0): 0.2, device(1.0): 0.8})
    simulation = Conditions(ls.ClientDropout({0.0: 0.7, 1.0: 0.3}), clock).prepare(50, seed=0)
    assert [simulation.profiles.of(c) for c in range(50)].count(device(9.0)) == 10
    rounds = [simulation.outcomes(round_idx, dict.fromkeys(units(50), TASK)) for round_idx in range(3)]
    assert left_out(rounds[0], 50).count("dropped_out") == 15
    assert repr(rounds[0]) == repr(rounds[1]) == repr(rounds[2])


def test_conditions_that_are_the_same_for_a_million_clients_cost_no_memory() -> None:
    simulation = Conditions(ls.ClientDropout(0.3), ls.VirtualClock(device(1.0))).prepare(10**6, seed=0)
    for assigned in (simulation.probabilities, simulation.profiles):
        assert assigned is not None
        assert (len(assigned), assigned.indices.untyped_storage().nbytes()) == (10**6, 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("algorithm", "filters", "epochs"),  # in all phases of a turn, with two local epochs
    [
        (ls.FedAvg(), [], 2),
        (ls.FedAvg(), [ls.Personal(["*.bias"], epochs=3)], 5),
        (ls.Ditto(pull=0.1), [], 4),
        (ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}), [], 2),
    ],
    ids=repr,
)
def test_the_clock_of_a_run_counts_what_the_ledger_counts(
    lit: Any, data: Any, fit: Fit, algorithm: Any, filters: Any, epochs: int
) -> None:
    """Every client's seconds, from its bytes in the ledger and the parameters of its sub-model."""
    sizes: dict[float, int] = {}

    class Weigh(ls.RoundCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, turn: Any) -> None:
            ratio = turn.download.capacity
            with pl_module.engine._executor.device.forms.client(ratio) as client:
                sizes[ratio] = sum(parameter.numel() for parameter in client.parameters())

    clock = ls.VirtualClock(ls.simulation.DeviceProfile(downlink=1e4, uplink=1e3, macs_per_second=1e5))
    settings = {"algorithm": algorithm, "filters": filters, "clients_per_round": 6, "local_epochs": 2, "clock": clock}
    fitted = fit(lit, data, max_epochs=2, callbacks=[Weigh()], **settings)
    history, ledger = fitted.history, fitted.ledger
    for row in ledger.rows:
        work = 3 * sizes[row.keep_ratio] * 10 * epochs  # ten examples each
        by_hand = row.downlink_bytes / 1e4 + work / 1e5 + row.uplink_bytes / 1e3
        assert row.virtual_seconds == pytest.approx(by_hand, rel=1e-12)
    for round_idx, seconds in enumerate(history.column("fl/virtual_seconds")):
        assert seconds == max(r.virtual_seconds for r in ledger.rows if r.round_idx == round_idx and r.virtual_seconds)


def test_local_epochs_may_differ_between_clients_and_the_clock_follows(lit_mlp: Any, data: Any, fit: Fit) -> None:
    turns: dict[int, tuple[int, float]] = {}

    class Turns(ls.RoundCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            turns.update({own.client_id: (own.num_steps, own.virtual_seconds) for own in summary.clients})

    clock = ls.VirtualClock(ls.simulation.DeviceProfile(math.inf, math.inf, 1.0), macs=lambda keep_ratio: 1.0)
    settings = {"clients_per_round": 12, "max_epochs": 1, "clock": clock, "callbacks": [Turns()]}
    epochs = [1 + client % 3 for client in range(12)]
    fit(lit_mlp(), data, local_epochs=epochs, **settings)
    assert turns == {client: (3 * own, 3 * 10 * own) for client, own in enumerate(epochs)}  # ten examples, batches of 4
    fit(lit_mlp(), data, local_epochs={1: 0.75, 3: 0.25}, **settings)
    assert sorted(turns.values()) == [(3, 30)] * 9 + [(9, 90)] * 3
    assert same_state(*(fit(seeded(lit_mlp), data, local_epochs=own, **settings).state for own in (2, [2] * 12)))
    with pytest.raises(ValueError, match="`local_epochs` lists 2 values for 12 clients; give one per client"):
        fit(lit_mlp(), data, local_epochs=[1, 2], **settings)


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})], ids=repr)
def test_a_clock_that_leaves_nobody_out_changes_no_weight(lit_mlp: Any, data: Any, fit: Fit, algorithm: Any) -> None:
    clock = ls.VirtualClock(device(1.0), deadline=1e9, keep_first=4)
    plain, timed = (
        fit(seeded(lit_mlp), data, algorithm=algorithm, max_epochs=2, **conditions).state
        for conditions in ({}, {"clock": clock, "dropout": ls.ClientDropout(0.0)})
    )
    assert same_state(plain, timed)
