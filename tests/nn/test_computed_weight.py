"""The weight of a sharded layer can be read, and not be written in vain."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_spectral.nn import LayerChoices, replace_layers

WRITES: dict[str, Callable[[Any], Any]] = {
    "clamp_": lambda layer: layer.weight.clamp_(-0.01, 0.01),
    "clamp_ of data": lambda layer: layer.weight.data.clamp_(-0.01, 0.01),
    "clamp_ of detached": lambda layer: layer.weight.detach().clamp_(-0.01, 0.01),
    "copy_ of a view": lambda layer: layer.weight.data.view(-1)[:2].copy_(torch.zeros(2)),
    "part": lambda layer: layer.weight.data.unbind()[0].zero_(),
    "item": lambda layer: layer.weight.data.__setitem__(0, 0.0),
    "renorm_": lambda layer: layer.weight.data.renorm_(2, 0, 1.0),
    "max_norm": lambda layer: nn.init.normal_(layer.weight),
    "out": lambda layer: torch.clamp(torch.zeros(6, 4), 0.0, 1.0, out=layer.weight.data),
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.data], 2.0),
    "function in place": lambda layer: nn.functional.relu(layer.weight.data, inplace=True),
    "data": lambda layer: setattr(layer.weight, "data", torch.zeros(6, 4)),
    "grad": lambda layer: setattr(layer.weight, "grad", torch.zeros(6, 4)),
    "frozen": lambda layer: layer.weight.requires_grad_(False),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(6, 4))),
    "tensor": lambda layer: setattr(layer, "weight", torch.zeros(6, 4)),
}


def swapped(dense: nn.Module) -> Any:
    return replace_layers(nn.ModuleDict({"critic": dense}), 0.5, layers=LayerChoices(keep_first_and_last_dense=False))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_would_be_lost_is_an_error_with_the_layers_name(write: str, mode: Callable[[], Any]) -> None:
    layer = swapped(nn.Linear(4, 6))["critic"]
    with mode(), pytest.raises(RuntimeError, match=r"critic.weight.*exclude=\['critic'\]"):
        WRITES[write](layer)


@pytest.mark.parametrize(
    ("dense", "name"),
    [
        (nn.Conv1d(4, 4, 3), "weight"),
        (nn.Conv2d(4, 4, 3, groups=2), "weight"),
        (nn.MultiheadAttention(4, 2), "in_proj_weight"),
        (nn.MultiheadAttention(4, 2, kdim=3), "q_proj_weight"),
        (nn.LSTM(4, 4), "weight_hh_l0"),
    ],
)
def test_no_layer_takes_a_new_weight(dense: nn.Module, name: str) -> None:
    layer = swapped(dense)["critic"]
    with pytest.raises(RuntimeError, match=f"critic.{name}"):
        setattr(layer, name, nn.Parameter(torch.zeros(4, 4)))
    if hasattr(layer, name):
        with pytest.raises(RuntimeError, match=f"critic.{name}"):
            getattr(layer, name).data.zero_()


def test_what_is_computed_from_a_weight_is_plain_and_has_gradients() -> None:
    layer = swapped(nn.Linear(4, 6))["critic"]
    weight = layer.weight
    average, kept = torch.zeros(6, 4), copy.deepcopy(weight.detach())
    with torch.no_grad():
        average.lerp_(weight, 0.5)
    assert {type(part) for part in (weight * 2, weight.norm(), weight.clone(), kept.clamp_(0.0))} == {torch.Tensor}
    (weight.abs().sum() + nn.functional.linear(torch.ones(1, 4), weight.T.T).square().sum()).backward()
    assert layer.u.grad is not None
    torch.testing.assert_close(2 * average, layer.weight.detach())


def test_gradients_of_a_weight_are_not_silently_none() -> None:
    with pytest.raises(AttributeError, match=r"critic.weight` has no `grad`"):
        _ = swapped(nn.Linear(4, 6))["critic"].weight.grad


@pytest.mark.slow
def test_a_compiled_function_reads_the_weight_and_cannot_write_it() -> None:
    layer = swapped(nn.Linear(4, 6))["critic"]
    read = torch.compile(lambda x: layer(x).sum() + layer.weight.abs().sum(), backend="eager")
    write = torch.compile(lambda x: layer(x).sum() + layer.weight.data.clamp_(-0.1, 0.1).sum(), backend="eager")
    x = torch.ones(2, 4)
    torch.testing.assert_close(read(x), layer(x).sum() + layer.weight.abs().sum())
    with pytest.raises(RuntimeError, match=r"critic.weight` cannot be written"):
        write(x)
