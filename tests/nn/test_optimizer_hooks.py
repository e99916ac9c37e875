import copy

import pytest
import torch
from torch import nn

from lightning_spectral.nn import SpectralShardedLinear
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay


def layer_with_gradients(omega: list[float]) -> SpectralShardedLinear:
    generator = torch.Generator().manual_seed(0)
    n = len(omega)
    layer = SpectralShardedLinear(5, 4, n)
    layer.load_terms(
        torch.randn(4, n, generator=generator), torch.randn(n, 5, generator=generator), torch.tensor(omega)
    )
    layer(torch.randn(8, 5, generator=generator)).square().mean().backward()
    return layer


def test_clipping_is_a_smaller_learning_rate_of_the_term_also_with_momentum() -> None:
    layer, plain = layer_with_gradients([20.0]), layer_with_gradients([20.0])
    clipped = torch.optim.SGD(layer.parameters(), lr=0.4, momentum=0.9)
    slow = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    EffectiveLRClip(tau=5.0).register(clipped, layer)
    for _ in range(3):
        gradients = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        clipped.step()
        slow.step()
    torch.testing.assert_close((layer.u, layer.v), (plain.u, plain.v))


def test_infinite_tau_changes_no_bit() -> None:
    layer, plain = layer_with_gradients([1.0, 1e8]), layer_with_gradients([1.0, 1e8])
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    EffectiveLRClip(tau=float("inf")).register(optimizer, layer)
    optimizer.step()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("tau", [0.5, float("nan"), -1.0])
def test_tau_below_one_is_refused(tau: float) -> None:
    with pytest.raises(ValueError, match="`tau` must be at least 1"):
        EffectiveLRClip(tau)


def test_decay_adds_the_gradient_of_half_the_squared_norm_of_the_weight() -> None:
    layer = layer_with_gradients([1.0, 3.0])
    expected = copy.deepcopy(layer)
    for mine, theirs in zip(expected.parameters(), layer.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    (0.05 * expected.weight.square().sum()).backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    FrobeniusDecay({"": 0.1}).register(optimizer, layer)
    optimizer.step()
    torch.testing.assert_close(layer.u.grad, expected.u.grad)
    torch.testing.assert_close(layer.v.grad, expected.v.grad)


def without_slope() -> SpectralShardedLinear:
    """A layer whose gradients are zero, so that only the decay moves it."""
    layer = layer_with_gradients([1.0, 3.0])
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return layer


def test_decay_shrinks_also_where_the_optimizer_maximises() -> None:
    layer = without_slope()
    before = layer.weight.detach().norm()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, maximize=True)
    FrobeniusDecay({"": 0.1}).register(optimizer, layer)
    optimizer.step()
    assert layer.weight.detach().norm() < before


def test_decoupled_decay_steps_along_the_penalty_with_the_learning_rate() -> None:
    layer = without_slope()
    u_grad, v_grad = torch.autograd.grad(0.05 * layer.weight.square().sum(), (layer.u, layer.v))
    u, v = layer.u.detach() - 0.2 * u_grad, layer.v.detach() - 0.2 * v_grad
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.2, weight_decay=0.0)
    FrobeniusDecay({"": 0.1}, decoupled=True).register(optimizer, layer)
    optimizer.step()
    torch.testing.assert_close(layer.u.detach(), u)
    torch.testing.assert_close(layer.v.detach(), v)


def test_decay_acts_on_named_layers_only_and_leaves_frozen_ones() -> None:
    module = nn.Sequential(layer_with_gradients([1.0]), layer_with_gradients([1.0]), layer_with_gradients([1.0]))
    frozen = module[2]
    frozen.u.grad = frozen.v.grad = None
    before = copy.deepcopy([p.grad for p in module[1].parameters()])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    handle = FrobeniusDecay({"0": 1.0, "1": 0.0, "2": 1.0}).register(optimizer, module)
    optimizer.step()
    assert frozen.u.grad is None
    for parameter, gradient in zip(module[1].parameters(), before, strict=True):
        assert torch.equal(parameter.grad, gradient)
    changed = module[0].u.grad.clone()
    handle.remove()
    optimizer.step()
    assert torch.equal(module[0].u.grad, changed)
