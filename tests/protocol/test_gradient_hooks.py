"""Hooks on the gradients of a user's parameters act on every client."""

from typing import Any

import pytest
import torch
from federation import HARDLY_MOVED, Fit, same_state, seeded
from torch import nn

import lightning_spectral as ls
from lightning_spectral.nn import plan_layers

SPECTRAL = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False))


@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_layer_with_a_gradient_hook_stays_dense(add: str, parameter: str) -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    getattr(module[1].get_parameter(parameter), add)(lambda _: None)
    reasons = [layer.reason for layer in plan_layers(module).layers]
    assert reasons == ["first layer", f"its `{parameter}` has a gradient hook", "affine", "last layer"]


@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.Scaffold(), SPECTRAL, ls.Zampling(2)])
def test_rows_that_a_hook_freezes_do_not_move(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp(momentum=0.0)
    start = module.net[2].weight.detach().clone()
    module.net[2].weight.register_hook(lambda gradient: gradient * (torch.arange(12) % 2)[:, None])
    weight = fit(module, data, algorithm=algorithm).module.net[2].weight
    assert torch.equal(weight[::2], start[::2])
    assert not torch.equal(weight[1::2], start[1::2])


def test_a_hook_that_changes_nothing_changes_no_bit(lit_mlp: Any, data: Any, fit: Fit) -> None:
    plain, hooked = seeded(lit_mlp), seeded(lit_mlp)
    hooked.net[2].weight.register_hook(lambda gradient: 1.0 * gradient)
    assert same_state(fit(plain, data).state, fit(hooked, data).state)
