"""Settings of clients and of rounds: one for all, by share, by client, or by round."""

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lightning_spectral as ls
from lightning_spectral.protocol.per_client import Assigned, Schedule, assign, value_at, values_of
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.simulation import Conditions

SLOW, MEDIUM, FAST = (ls.simulation.DeviceProfile(speed, speed, speed) for speed in (1.0, 10.0, 100.0))


def keep_ratios(value: Any, num_clients: int, seed: int) -> Assigned[Any]:
    return ls.SpectralSharding(keep_ratio=value).capacities.of_clients(num_clients, seed)


def devices(value: Any, num_clients: int, seed: int) -> Assigned[Any]:
    profiles = Conditions(clock=ls.VirtualClock(value)).prepare(num_clients, seed).profiles
    assert profiles is not None
    return profiles


def probabilities(value: Any, num_clients: int, seed: int) -> Assigned[Any]:
    found = Conditions(ls.ClientDropout(value)).prepare(num_clients, seed).probabilities
    assert found is not None
    return found


# each user of the law, its purpose, and three values that it accepts
USERS = [
    pytest.param(keep_ratios, "keep ratios", (0.1, 0.2, 1.0), id="keep ratios"),
    pytest.param(devices, "device profile", (SLOW, MEDIUM, FAST), id="devices"),
    pytest.param(probabilities, "dropout probability", (0.0, 0.2, 0.9), id="dropout probabilities"),
]
SHARES = [(0.2, 0.5, 0.3), (0.07, 0.2, 0.73), (1 / 3, 1 / 3, 1 / 3)]


def everyone(assigned: Assigned[Any]) -> list[Any]:
    return [assigned.of(client_id) for client_id in range(len(assigned))]


def by_hand(shares: dict[Any, float], num_clients: int, seed: int, purpose: str) -> list[Any]:
    """The law applied to one client at a time."""
    counts = {value: math.floor(share * num_clients + 1e-9) for value, share in shares.items()}
    by_remainder = sorted(shares, key=lambda value: counts[value] - shares[value] * num_clients)
    for value in by_remainder[: num_clients - sum(counts.values())]:
        counts[value] += 1
    in_order = [value for value, count in counts.items() for _ in range(count)]
    permutation = torch.randperm(num_clients, generator=derived_generator(seed, purpose))
    return [in_order[place] for place in permutation]


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("num_clients", [1, 2, 10, 101])
@pytest.mark.parametrize(("user", "purpose", "values"), USERS)
def test_shares_are_assigned_as_by_hand(
    user: Callable[..., Assigned[Any]],
    purpose: str,
    values: tuple[Any, ...],
    num_clients: int,
    shares: tuple[float, ...],
) -> None:
    value = dict(zip(values, shares, strict=True))
    for seed in range(3):
        assert everyone(user(value, num_clients, seed)) == by_hand(value, num_clients, seed, purpose)


@given(num_clients=st.integers(1, 500), seed=st.integers(0, 3), percent=st.integers(1, 99))
def test_a_share_that_does_not_divide_evenly_is_off_by_less_than_a_client(
    num_clients: int, seed: int, percent: int
) -> None:
    assigned = everyone(assign({"a": percent / 100, "b": 1.0 - percent / 100}, num_clients, seed, "test"))
    assert len(assigned) == num_clients
    assert abs(assigned.count("a") - Fraction(percent, 100) * num_clients) < 1


@pytest.mark.parametrize(("user", "purpose", "values"), USERS)
def test_who_has_which_value_is_drawn_from_the_seed_alone(user: Any, purpose: str, values: tuple[Any, ...]) -> None:
    shares = dict(zip(values, (0.2, 0.5, 0.3), strict=True))
    first, again, other = (everyone(user(shares, 50, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_different_settings_are_drawn_independently() -> None:
    """Otherwise slow devices would be those with small keep ratios, although no user asked for that."""
    drawn = [everyone(assign({0: 0.5, 1: 0.5}, 50, 0, user.values[1])) for user in USERS]  # type: ignore[attr-defined]
    assert len({tuple(indices) for indices in drawn}) == len(USERS)


@pytest.mark.parametrize(("user", "purpose", "values"), USERS)
def test_one_for_all_or_one_per_client(user: Any, purpose: str, values: tuple[Any, ...]) -> None:
    a, b, c = values
    assert everyone(user(b, 3, seed=0)) == [b, b, b]
    assert everyone(user([c, a, c, b], 4, seed=5)) == [c, a, c, b]
    assert user([c, a, c, b], 4, seed=5).values == (c, a, b)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", [lambda value: value, lambda value: {value: 1.0}, lambda value: [value] * 10**6])
@pytest.mark.parametrize(("user", "purpose", "values"), USERS)
def test_a_million_clients_with_one_value_take_one_number_in_memory(
    user: Any, purpose: str, values: tuple[Any, ...], form: Any
) -> None:
    assigned = user(form(values[0]), 10**6, seed=0)
    assert (len(assigned), assigned.of(10**6 - 1), assigned.values) == (10**6, values[0], values[:1])
    assert assigned.indices.untyped_storage().nbytes() == assigned.indices.element_size() == 8


def test_ids_out_of_range_have_no_value() -> None:
    for value in (0.5, {0.5: 0.5, 1.0: 0.5}, [0.5, 1.0, 0.5]):
        with pytest.raises(IndexError, match="index 3 is out of bounds for dimension 0 with size"):
            keep_ratios(value, 3, seed=0).of(3)


@pytest.mark.parametrize(("user", "purpose", "values"), USERS)
def test_what_is_not_one_setting_of_every_client_is_refused(user: Any, purpose: str, values: tuple[Any, ...]) -> None:
    a, b, _ = values
    for value, message in [
        ([], r"^`\w+` must be one value for all clients, .* or a list with one value per client, got \[\]"),
        ({}, r"^`\w+` must be one value for all clients, .* or a list with one value per client, got \{\}"),
        ({a: 0.6, b: 0.5}, r"Shares of `\w+` must sum to 1, got 0.6 \+ 0.5 = 1.1; write {value: share of clients}"),
        ({a: 1.2, b: -0.2}, r"`\w+\[.*\]` must be positive and finite, got -0.2; it is a share of the clients"),
        ({a: 1.0, b: 0.0}, r"`\w+\[.*\]` must be positive and finite, got 0.0"),
        ({a: math.nan, b: 1.0}, r"`\w+\[.*\]` must be positive and finite, got nan"),
        ({a: "half", b: 0.5}, r"`\w+\[.*\]` must be a number, got 'half'; it is a share of the clients"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            user(value, 2, seed=0)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two keep ratios for three": (
        lambda: keep_ratios([0.1, 0.2], 3, seed=0),
        "`keep_ratio` lists 2 values for 3 clients",
    ),
    "one device for two": (
        lambda: Conditions(None, ls.VirtualClock([SLOW])).check(2, 1),
        "`profiles` lists 1 values for 2 clients",
    ),
    "three probabilities for two": (
        lambda: Conditions(ls.ClientDropout([0.1] * 3)).check(2, 1),
        "`probability` lists 3 values for 2 clients",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_the_error_names_the_argument(wrong: str) -> None:
    call, message = REFUSED[wrong]
    with pytest.raises(ValueError, match=message):
        call()


def slow_value_at(values: Mapping[int, Any], round_idx: int) -> Any:
    """Walk through the rounds, changing the value wherever one begins."""
    now = None
    for r in range(round_idx + 1):
        now = values.get(r, now)
    return now


@pytest.mark.parametrize(
    "values",
    [{0: "a"}, {0: "a", 1: "b"}, {0: "a", 3: "b", 7: "c"}, {7: "c", 0: "a", 3: "b"}, {0: None, 2: "b", 5: None}],
)
def test_each_value_holds_from_its_round_until_the_next(values: dict[int, Any]) -> None:
    schedule = Schedule(values)
    for round_idx in range(12):
        assert schedule.at(round_idx) == value_at(schedule, round_idx) == slow_value_at(values, round_idx)


def test_the_order_in_which_rounds_are_given_does_not_matter() -> None:
    one, two = Schedule({5: "b", 0: "a"}), Schedule({0: "a", 5: "b"})
    assert one == two
    assert repr(one) == repr(two) == "Schedule({0: 'a', 5: 'b'})"
    assert list(values_of(one)) == ["a", "b"]
    assert one != Schedule({0: "a", 4: "b"})


def test_repr_is_the_call_that_makes_it() -> None:
    schedule = Schedule({2: 0.5, 0: None})
    assert eval(repr(schedule)) == schedule


def test_a_schedule_keeps_nothing_of_the_callers() -> None:
    values = {0: "a"}
    schedule = Schedule(values)
    values[1] = "b"
    assert schedule.at(1) == "a"
    assert Schedule(MappingProxyType(values)) == Schedule({0: "a", 1: "b"})


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda schedule: pickle.loads(pickle.dumps(schedule))])
def test_copies_are_equal(remake: Any) -> None:
    schedule = Schedule({0: "a", 2: "b"})
    assert remake(schedule) == schedule
    assert repr(remake(schedule)) == repr(schedule)


@pytest.mark.parametrize("setting", ["a", None, {0: "a"}])
def test_what_is_no_schedule_holds_in_all_rounds(setting: Any) -> None:
    assert value_at(setting, 0) is value_at(setting, 100) is setting
    assert list(values_of(setting)) == [setting]
