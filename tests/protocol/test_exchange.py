import copy
import math

import pytest
import torch
from torch import nn

from lightning_spectral.protocol.buffer_rules import buffer_policies
from lightning_spectral.protocol.exchange import (
    apply_mean_change,
    averaged_tensors,
    buffer_shapes,
    check_same_buffers,
    load_tensors,
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


def test_what_is_averaged_can_be_averaged() -> None:
    names = averaged_tensors(net()).keys()
    assert {"0.weight", "1.running_mean", "1.running_var"} <= names
    assert names.isdisjoint({"2.bias", "1.num_batches_tracked", "cache"})
    assert "0.weight" not in averaged_tensors(net(), without={"0.weight"})


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
    policies = {name: policy for name, _, policy in buffer_policies(with_spectral_norms(), {"*.0._v": "server"})}
    assert policies == {
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
        r"`cache` was of shape \(2,\) and is no tensor; `queue` was of shape \(2, 3\) and is of shape \(4, 3\); "
        r"`centre` was no tensor and is of shape \(\)\. Register such a buffer with a tensor of its final size"
    )
    with pytest.raises(ValueError, match=message):
        check_same_buffers(module, shapes)
