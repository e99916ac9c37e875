"""Which rule a buffer follows, and that it goes on to follow it."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_spectral.protocol.buffer_rules import BufferRules, as_rules, buffer_policies, buffer_rules

INF, NAN = torch.inf, torch.nan
BUFFERS: dict[str, Any] = {
    "total": torch.zeros(2),
    "low": torch.tensor([INF, INF]),
    "high": torch.tensor(-INF),
    "range": torch.tensor([INF, -INF]),
    "mask": torch.tensor([0.0, -INF]),
    "bounds": torch.tensor([0.0, INF, -INF]),
    "unset": torch.tensor([NAN, 1.0]),
    "count": torch.tensor(3),
    "seen": torch.tensor(False),
    "phase": torch.tensor(1j),
}


def module() -> nn.Module:
    made = nn.Module()
    for name, tensor in BUFFERS.items():
        made.register_buffer(name, tensor.clone())
    made.register_buffer("cache", torch.zeros(1), persistent=False)
    return made


def rules_of(found: BufferRules) -> dict[str, Any]:
    """For each buffer that travels back, its signs, and whether entries are averaged."""
    signs = {name: found.limits[name].tolist() for name in found.limits}
    return {name: (signs.get(name, 0), name in found.mean) for name in sorted(found.returned)}


DEFAULTS = {
    "total": (0, True),
    "low": (-1, False),
    "high": (1, False),
    "range": ([-1, 1], False),
    "mask": ([0, 1], True),
    "bounds": ([0, -1, 1], True),
}


def test_what_is_infinite_follows_the_extreme_that_can_leave_it() -> None:
    assert rules_of(buffer_rules(module())) == dict(sorted(DEFAULTS.items()))


def test_a_users_rules_come_first_and_the_first_that_matches_counts() -> None:
    asked = as_rules("buffers", {"low": "server", "count": "min", "seen": "max", "mask": "max", "?o*": "server"})
    expected = {**DEFAULTS, "count": (-1, False), "seen": (1, False), "mask": (1, False)}
    for name in ("low", "total", "bounds"):
        expected.pop(name)
    assert rules_of(buffer_rules(module(), asked)) == dict(sorted(expected.items()))


def test_what_was_decided_holds_when_the_values_are_finite() -> None:
    server = module()
    first = buffer_rules(server)
    for name, buffer in server.named_buffers():
        if name != "phase":
            buffer.fill_(1)
    assert rules_of(buffer_rules(server, None, first.decisions)) == rules_of(first)
    everything_is_averaged = {name: (0, True) for name in sorted([*DEFAULTS, "unset"])}
    assert rules_of(buffer_rules(server)) == everything_is_averaged  # or the test would show nothing


def test_only_values_that_are_not_finite_decide_anything() -> None:
    assert buffer_rules(module()).decided.keys() == {"low", "high", "range", "mask", "bounds", "unset"}
    assert buffer_rules(nn.BatchNorm1d(2)).decisions == {}


def test_averages_see_zeros_for_entries_that_follow_an_extreme() -> None:
    found, tensors = buffer_rules(module()), {**BUFFERS, "weight": torch.ones(2)}
    averaged = found.averaged(tensors)
    assert averaged.keys() == tensors.keys() - {"low", "high", "range"}
    assert averaged["bounds"].tolist() == [0.0, 0.0, 0.0]
    assert averaged["weight"] is tensors["weight"]
    part = found.averaged({"bounds": torch.tensor([5.0, 7.0])}, {"bounds": torch.tensor([2, 0])})
    assert part["bounds"].tolist() == [0.0, 7.0]


def test_rules_can_be_limited_to_some_buffers() -> None:
    only = buffer_rules(module()).only(frozenset({"low", "total"}))
    assert rules_of(only) == {"low": (-1, False), "total": (0, True)}
    assert only.decided.keys() == {"low"}


def test_the_plan_says_what_is_done() -> None:
    policies = {name: policy for name, _, policy in buffer_policies(module(), {"count": "max", "total": "server"})}
    assert policies == {
        "total": "the server's: as asked",
        "low": "the clients' smallest",
        "high": "the clients' largest",
        "range": "largest where -inf, smallest where inf",
        "mask": "largest where -inf, else averaged",
        "bounds": "largest where -inf, smallest where inf, else averaged",
        "unset": "the server's: it holds NaN",
        "count": "the clients' largest",
        "seen": "the server's: not a floating-point number",
        "phase": "the server's: not a floating-point number",
        "cache": "the server's: no checkpoint holds it",
    }


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"nope": "max"}, "`buffers` pattern 'nope' matches no buffer; known names: total, low"),
        ({"count": "mean"}, r"gives 'mean' to `count`, which is of type torch.int64 and has no mean; write 'min'"),
        ({"low": "mean"}, "gives 'mean' to `low`, which holds values that are not finite and has no mean; write 'min'"),
        ({"phase": "min"}, "gives 'min' to `phase`, which holds complex numbers, .* write 'server'"),
        ({"cache": "min"}, "gives 'min' to `cache`, which is not persistent, .* register it as persistent"),
    ],
)
def test_what_a_buffer_cannot_follow_is_refused(rules: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        buffer_rules(module(), rules)


@pytest.mark.parametrize("rules", [["*.low"], {1: "min"}, "min", None])
def test_rules_that_are_no_mapping_from_patterns_are_refused(rules: Any) -> None:
    with pytest.raises(ValueError, match=r"`buffers` must map patterns of names to rules, got .*; write buffers=\{'"):
        as_rules("buffers", rules)
