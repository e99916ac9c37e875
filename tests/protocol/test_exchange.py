"""Which tensors travel, what becomes of buffers, and how an average changes the server."""

import copy
import math
from collections import OrderedDict
from typing import Any

import pytest
import torch
from federation import seeded
from torch import nn
from torch.nn.utils import prune

from lightning_spectral.protocol.buffer_rules import BufferRules, as_rules, buffer_policies, buffer_rules
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    buffer_shapes,
    check_same_buffers,
    copy_module,
    load_tensors,
    returned_tensors,
    select_tensors,
    travelling_tensors,
)


def net() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module.register_buffer("mask", torch.tensor([0.0, -math.inf]))
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    module[2].bias.requires_grad_(False)
    return module


def test_what_travels_is_what_a_copy_needs() -> None:
    server, client = net(), net()
    load_tensors(client, travelling_tensors(server))
    assert all(
        torch.equal(a, b) for a, b in zip(server.state_dict().values(), client.state_dict().values(), strict=True)
    )
    assert "cache" in travelling_tensors(server)  # not in a state_dict, but clients must not pass it on to each other


def test_what_clients_send_back_can_be_averaged() -> None:
    names = returned_tensors(net()).keys()
    assert {"0.weight", "1.running_mean", "1.running_var"} <= names
    assert names.isdisjoint({"2.bias", "1.num_batches_tracked", "cache"})
    assert "0.weight" not in returned_tensors(net(), without={"0.weight"})


def test_selected_tensors_are_views_of_the_module() -> None:
    module = net()
    selected = select_tensors(module, ["0.weight"])
    assert selected["0.weight"].data_ptr() == module[0].weight.data_ptr()
    assert not selected["0.weight"].requires_grad


def test_tied_parameters_travel_once() -> None:
    module = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    module["head"].weight = module["embed"].weight
    assert list(travelling_tensors(module)) == ["embed.weight"]


def test_change_becomes_a_pseudo_gradient_and_moves_buffers() -> None:
    server = net()
    before = copy.deepcopy(server.state_dict())
    changes = {"0.bias": torch.full((4,), 0.5).double(), "1.running_mean": torch.full((4,), 2.0).double()}
    apply_mean_change(server, changes.items())
    torch.optim.SGD(server.parameters(), lr=1.0).step()
    torch.testing.assert_close(server[0].bias, before["0.bias"] + 0.5)
    torch.testing.assert_close(server[1].running_mean, before["1.running_mean"] + 2.0)
    assert torch.equal(server[0].weight, before["0.weight"])


def with_spectral_norms() -> nn.Sequential:
    old = nn.utils.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), old, nn.BatchNorm1d(5))


OLD = pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")


@OLD
def test_the_plan_says_that_singular_vectors_stay_unit_vectors() -> None:
    assert {name: policy for name, _, policy in buffer_policies(with_spectral_norms(), {"*.0._v": "server"})} == {
        "0.parametrizations.weight.0._u": "averaged, then scaled to norm 1",
        "0.parametrizations.weight.0._v": "the server's: as asked",
        "1.weight_u": "averaged, then scaled to norm 1",
        "1.weight_v": "averaged, then scaled to norm 1",
        "2.running_mean": "averaged",
        "2.running_var": "averaged",
        "2.num_batches_tracked": "the server's: not a floating-point number",
    }


@OLD
def test_averaged_singular_vectors_have_norm_one() -> None:
    server = with_spectral_norms()
    own = {name: buffer for name, buffer in server.named_buffers() if name.endswith(("_u", "_v"))}
    expected = {name: nn.functional.normalize(buffer + 0.5, dim=0) for name, buffer in own.items()}
    apply_mean_change(server, [(name, torch.full_like(buffer, 0.5)) for name, buffer in own.items()])
    assert len(own) == 4
    for name, buffer in own.items():
        torch.testing.assert_close(buffer, expected[name])


def test_buffers_that_the_server_cannot_follow_are_refused_by_name() -> None:
    module = net()
    module.register_buffer("queue", torch.zeros(2, 3))
    module.register_buffer("centre", None)
    shapes = buffer_shapes(module)
    module.queue = torch.ones(2, 3)
    check_same_buffers(module, shapes)
    module.queue, module.centre, module.cache = torch.zeros(4, 3), torch.zeros(()), None
    message = (
        r"`queue` was of shape \(2, 3\) and is of shape \(4, 3\); "
        r"`centre` was no tensor and is of shape \(\)\. Register such a buffer with a tensor of its final size"
    )
    with pytest.raises(ValueError, match=message):
        check_same_buffers(module, shapes)


def test_a_copy_shares_no_gradient_function_with_the_original() -> None:
    layer = prune.l1_unstructured(seeded(nn.Linear, 4, 4), "weight", 0.5)
    copied = copy_module(layer)
    copied(torch.ones(1, 4)).sum().backward()
    assert copied.weight_orig.grad is not None
    assert layer.weight_orig.grad is None


def test_what_is_added_to_a_copy_where_the_original_has_nothing_is_not_added_to_it() -> None:
    layer: Any = nn.Linear(2, 2)
    layer.cache, layer.alias = {}, OrderedDict()
    layer.same = layer.cache
    copied = copy_module(layer)
    copied.register_forward_hook(print)
    copied.cache["seen"] = copied.alias["seen"] = True
    assert copied.same is copied.cache
    assert type(copied.alias) is OrderedDict
    assert not any((layer._forward_hooks, layer.cache, layer.alias))


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
    assert {name: policy for name, _, policy in buffer_policies(module(), {"count": "max", "total": "server"})} == {
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
