"""A setting by round: which value holds when, and what is not a schedule."""

import copy
import pickle
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest

from lightning_spectral.protocol.per_client import Schedule, value_at, values_of


def slow_value_at(values: Mapping[int, Any], round_idx: int) -> Any:
    """Walk through the rounds, changing the value wherever one begins."""
    now = None
    for r in range(round_idx + 1):
        now = values.get(r, now)
    return now


@pytest.mark.parametrize("values", [{0: "a"}, {0: "a", 1: "b"}, {0: "a", 3: "b", 7: "c"}, {7: "c", 0: "a", 3: "b"}])
def test_each_value_holds_from_its_round_until_the_next(values: dict[int, str]) -> None:
    schedule = Schedule(values)
    for round_idx in range(12):
        assert schedule.at(round_idx) == value_at(schedule, round_idx) == slow_value_at(values, round_idx)


def test_values_may_be_none() -> None:
    assert [Schedule({0: None, 2: "b"}).at(r) for r in range(4)] == [None, None, "b", "b"]


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"needs a value for round 0, got rounds \[\]"),
        ({5: "b", 1: "a"}, r"needs a value for round 0, got rounds \[1, 5\]"),
        ({0: "a", -1: "b"}, "`values` must be at least 0, got -1; the keys of a schedule are rounds"),
        ({False: "a"}, "`values` must be a whole number, got False"),
        ({0: "a", True: "b"}, "`values` must be a whole number, got True"),
        ({0: "a", "1": "b"}, "`values` must be a whole number, got '1'"),
        ({0: "a", 1.0: "b"}, "`values` must be a whole number, got 1.0"),
        ("a", r"maps rounds to values, got 'a'; write Schedule\(\{0: ...\}\)"),
        ([(0, "a")], "maps rounds to values, got"),
        (None, "maps rounds to values, got None"),
    ],
)
def test_what_is_not_a_schedule_is_refused(values: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Schedule(values)
