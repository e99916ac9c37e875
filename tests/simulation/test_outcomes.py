"""The virtual clock against sums by hand; who is late, who is surplus, and how long a round takes."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_spectral as ls
from lightning_spectral.simulation import Conditions, Fate, Turn

TURN = Turn(0.5, num_examples=10, local_epochs=2, num_parameters=100, downlink_bytes=400, uplink_bytes=300)


def device(seconds: float) -> ls.DeviceProfile:
    """A device that takes so long to receive ``TURN`` and no time for anything else."""
    return ls.DeviceProfile(downlink=400 / seconds, uplink=math.inf, macs_per_second=math.inf)


def fates(seconds: list[float], dropped: list[float] | None = None, turn: Turn = TURN, **options: Any) -> Any:
    clock = ls.VirtualClock([device(s) for s in seconds], **options)
    dropout = None if dropped is None else ls.ClientDropout(dropped)
    return Conditions(dropout, clock).fates(0, 0, dict.fromkeys(range(len(seconds)), turn))


@pytest.mark.parametrize(
    ("macs", "forward"), [(None, 100), ({0.5: 70.0, 1.0: 90.0}, 70), (lambda keep_ratio: 1000 * keep_ratio, 500)]
)
def test_seconds_are_bytes_over_bandwidth_plus_work_over_speed(macs: Any, forward: int) -> None:
    clock = ls.VirtualClock(ls.DeviceProfile(downlink=200.0, uplink=60.0, macs_per_second=50.0), macs=macs)
    assert clock.seconds(0, 0, TURN) == pytest.approx(400 / 200 + 3 * forward * 10 * 2 / 50 + 300 / 60, rel=1e-12)


def test_a_round_takes_as_long_as_its_slowest_client() -> None:
    result = fates([3.0, 1.0, 2.0])
    assert [result.of(c) for c in range(3)] == [Fate(None, 3.0), Fate(None, 1.0), Fate(None, 2.0)]
    assert result.seconds == 3.0


def test_who_takes_longer_than_the_deadline_is_late_and_the_server_waits_until_then() -> None:
    result = fates([3.0, 1.0, 2.0], deadline=2.0)
    assert [result.of(c).left_out for c in range(3)] == ["late", None, None]
    assert result.seconds == 2.0
    assert fates([1.0, 1.5], deadline=2.0).seconds == 1.5  # all are there: nobody waits for the deadline


def test_the_first_to_finish_are_kept() -> None:
    result = fates([3.0, 1.0, 4.0, 2.0], keep_first=2)
    assert [result.of(c).left_out for c in range(4)] == ["surplus", None, "surplus", None]
    assert result.seconds == 2.0


def test_over_selection_makes_up_for_clients_that_drop_out_or_are_late() -> None:
    result = fates([3.0, 1.0, 9.0, 2.0, 4.0], dropped=[0, 1, 0, 0, 0], keep_first=2, deadline=5.0)
    assert [result.of(c).left_out for c in range(5)] == [None, "dropped_out", "late", None, "surplus"]
    assert result.seconds == 3.0


def test_the_server_waits_for_the_missed_until_the_deadline() -> None:
    assert fates([1.0, 2.0], dropped=[0, 1], deadline=5.0).seconds == 5.0
    assert fates([1.0, 2.0], dropped=[0, 1]).seconds == 1.0  # without one it knows at once
    assert fates([1.0, 2.0], dropped=[1, 1]).seconds == 0.0
    assert math.isnan(fates([1.0, 2.0], dropped=[0, 1]).of(1).seconds)
    no_data = Turn(0.5, num_examples=0, local_epochs=1)
    assert fates([1.0, 2.0], turn=no_data, deadline=5.0).seconds == 0.0  # who has no data says so at once


def test_which_of_equal_devices_comes_first_is_drawn_evenly() -> None:
    clock, rounds, kept = ls.VirtualClock(device(1.0), keep_first=3), 2000, torch.zeros(5)
    for round_idx in range(rounds):
        result = Conditions(clock=clock).fates(0, round_idx, dict.fromkeys(range(5), TURN))
        kept += torch.tensor([result.of(c).left_out is None for c in range(5)])
    sigma = math.sqrt(rounds * 0.6 * 0.4)
    assert kept.sum() == 3 * rounds
    assert (kept - 0.6 * rounds).abs().max() < 5 * sigma


def test_the_cost_table_tells_the_clock_the_work(lit: Any, toy: Any, quiet: Any) -> None:
    costs = ls.cost_table(lit, [0.5], torch.zeros(1, 6))
    macs = {ratio: cost.macs for ratio, cost in costs.at.items()}
    work_alone = ls.DeviceProfile(downlink=math.inf, uplink=math.inf, macs_per_second=1.0)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    model = ls.FederatedModule(
        lit,
        algorithm=ls.SpectralSharding(keep_ratio=0.5),
        clients_per_round=3,
        local_epochs=2,
        clock=ls.VirtualClock(work_alone, macs=macs),
    )
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(12), batch_size=4)
    pl.Trainer(max_epochs=1, callbacks=[history, ledger], **quiet).fit(model, data)
    dense, terms = 6 * 12 + 12 * 3, 6 * (12 + 12)
    assert costs.at[0.5].macs == dense + terms
    assert history.rows[0]["fl/virtual_seconds"] == 3 * (dense + terms) * 10 * 2


@pytest.mark.parametrize("options", [{"keep_first": 3}, {"deadline": 2.5}, {"keep_first": 2, "deadline": 3.0}])
def test_fates_do_not_depend_on_the_order_of_clients(options: dict[str, Any]) -> None:
    profiles = {device(1.0): 0.25, device(2.0): 0.5, device(3.0): 0.25}
    conditions = Conditions(ls.ClientDropout(0.3), ls.VirtualClock(profiles, **options))
    for round_idx in range(20):
        forward = conditions.fates(5, round_idx, {c: TURN for c in range(8)})
        backward = conditions.fates(5, round_idx, {c: TURN for c in reversed(range(8))})
        assert {c: repr(forward.of(c)) for c in range(8)} == {c: repr(backward.of(c)) for c in range(8)}
        assert forward.seconds == backward.seconds


def test_profiles_have_their_shares_and_stay_with_their_clients() -> None:
    slow, fast = device(9.0), device(1.0)
    clock, num_clients = ls.VirtualClock({slow: 0.2, fast: 0.8}), 5000
    profiles = [clock.profile(0, c) for c in range(num_clients)]
    assert abs(profiles.count(slow) - 0.2 * num_clients) < 5 * math.sqrt(num_clients * 0.2 * 0.8)
    assert profiles == [clock.profile(0, c) for c in range(num_clients)]
    assert profiles != [clock.profile(1, c) for c in range(num_clients)]


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_dropouts_are_as_frequent_as_said(probability: float) -> None:
    dropout, n = ls.ClientDropout(probability), 5000
    dropped = sum(dropout.drops(1, round_idx, c) for round_idx in range(50) for c in range(n // 50))
    assert abs(dropped - n * probability) <= 5 * math.sqrt(n * probability * (1 - probability))


def test_dropouts_differ_between_rounds_and_seeds() -> None:
    dropout = ls.ClientDropout(0.5)
    draws = [tuple(dropout.drops(seed, r, c) for c in range(64)) for seed in range(2) for r in range(2)]
    assert len(set(draws)) == 4


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})], ids=repr)
def test_the_clock_of_a_run_counts_what_the_ledger_counts(lit: Any, data: Any, quiet: Any, algorithm: Any) -> None:
    """Every client's seconds, from its bytes in the ledger and the parameters of its sub-model."""
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    sizes: dict[float, int] = {}

    class Weigh(ls.RoundCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, turn: Any) -> None:
            ratio = turn.download.capacity
            module = pl_module.engine._executor.device.sub_model(ratio).module
            sizes[ratio] = sum(parameter.numel() for parameter in module.parameters())

    clock = ls.VirtualClock(ls.DeviceProfile(downlink=1e4, uplink=1e3, macs_per_second=1e5))
    model = ls.FederatedModule(lit, algorithm=algorithm, clients_per_round=6, local_epochs=2, clock=clock)
    pl.Trainer(max_epochs=2, callbacks=[history, ledger, Weigh()], **quiet).fit(model, data)
    for row in ledger.rows:
        work = 3 * sizes[row.keep_ratio] * 10 * 2  # ten examples each, two epochs
        by_hand = row.downlink_bytes / 1e4 + work / 1e5 + row.uplink_bytes / 1e3
        assert row.virtual_seconds == pytest.approx(by_hand, rel=1e-12)
    for round_idx, seconds in enumerate(history.column("fl/virtual_seconds")):
        assert seconds == max(r.virtual_seconds for r in ledger.rows if r.round_idx == round_idx and r.virtual_seconds)


@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5})], ids=repr)
def test_a_clock_that_leaves_nobody_out_changes_no_weight(lit_mlp: Any, data: Any, quiet: Any, algorithm: Any) -> None:
    def weights(**conditions: Any) -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            module = lit_mlp()
        model = ls.FederatedModule(module, algorithm=algorithm, clients_per_round=4, **conditions)
        pl.Trainer(max_epochs=2, **quiet).fit(model, data)
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach()

    clock = ls.VirtualClock(device(1.0), deadline=1e9, keep_first=4)
    assert torch.equal(weights(), weights(clock=clock, dropout=ls.ClientDropout(0.0)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.DeviceProfile(0.0, 1.0, 1.0), "`downlink` must be positive, got 0.0"),
        (lambda: ls.VirtualClock(device(1.0), deadline=0.0), "`deadline` must be positive, got 0.0 seconds"),
        (lambda: ls.VirtualClock(device(1.0), keep_first=0), "`keep_first` must be at least 1, got 0"),
        (lambda: ls.VirtualClock({device(1.0): 0.5}), "must be positive and sum to 1, got .0.5."),
        (lambda: ls.VirtualClock([3.0]), "`profiles` must be an instance of DeviceProfile, got 3.0"),  # type: ignore[list-item]
        (lambda: ls.VirtualClock([device(1.0)]).check(2, 1), "`profiles` lists 1 devices for 2 clients"),
        (lambda: ls.VirtualClock(device(1.0), keep_first=3).check(9, 2), "at most clients_per_round=2, got 3"),
        (lambda: ls.VirtualClock(device(1.0), macs={1.0: 3.0}).seconds(0, 0, TURN), "no entry for keep ratio 0.5"),
        (lambda: ls.ClientDropout(1.1), r"`probability` must be in \[0, 1\], got 1.1"),
        (lambda: ls.ClientDropout([0.1, -1.0]), r"`probability` must be in \[0, 1\], got -1.0"),
        (lambda: ls.ClientDropout([0.1]).check(2), "`probability` lists 1 numbers for 2 clients"),
    ],
)
def test_arguments_that_cannot_be_meant(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()
