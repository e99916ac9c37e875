"""Hooks on the gradients of a user's parameters act on every client."""

from functools import partial
from typing import Any

import pytest
import torch
from federation import HARDLY_MOVED, Fit, same_state, seeded
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.nn import plan_layers
from lightning_spectral.protocol.exchange import copy_module

SPECTRAL = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False))


class Frozen(nn.Module):
    """Half of the rows of every weight must not change."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line = nn.Linear(2, 4)
        self.register_buffer("mask", torch.tensor([[0.0], [0.0], [1.0], [1.0]]))
        weight = self.line.weight
        inner = lambda gradient: gradient * self.mask  # noqa: E731
        hooks: dict[str, Any] = {
            "closure": lambda gradient: gradient * self.mask,
            "nested": lambda gradient: inner(gradient),
            "method": self.masked,
            "partial": partial(Frozen.masked, self),
        }
        if how == "accumulated":
            weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * self.mask))
        else:
            weight.register_hook(hooks[how])

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask


@pytest.mark.parametrize("how", ["closure", "nested", "method", "partial", "accumulated"])
def test_a_copy_has_the_hooks_and_they_refer_to_the_copy(how: str) -> None:
    original = Frozen(how)
    copied = copy_module(copy_module(original))
    copied.mask.fill_(3.0)
    for module, factor in ((copied, torch.full((4, 1), 3.0)), (original, original.mask)):
        module.line(torch.ones(1, 2)).sum().backward()
        assert torch.equal(module.line.weight.grad, factor.expand(4, 2))


def test_a_hook_on_a_parameter_that_a_copy_shares_is_an_error() -> None:
    module = Frozen("method")
    with pytest.raises(ValueError, match=r"'line.weight' has a gradient hook.*exclude"):
        copy_module(module, [module.line.weight])


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


def test_a_hook_that_knows_the_server_by_a_global_name_is_refused(lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp()
    names = {"model": module}
    exec("hook = lambda gradient: gradient * (model.net[2].weight > 0)", names)
    module.net[2].weight.register_hook(names["hook"])
    with pytest.raises(ValueError, match=r"'net.2.weight' uses the global variable 'model'.*use `self`"):
        fit(module, data)
