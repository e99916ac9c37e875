"""Hooks of optimizers, and factors of a client's turn, against steps computed by hand."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_spectral.functional.spectra import effective_lr_factors
from lightning_spectral.nn import SpectralShardedLinear
from lightning_spectral.nn.layers.terms import sharded_layers
from lightning_spectral.nn.optimizer_hooks import EffectiveLRClip, FrobeniusDecay, TermRates


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


def test_decay_adds_the_gradient_of_half_the_squared_norm_of_the_weight() -> None:
    layer = layer_with_gradients([1.0, 3.0])
    expected = copy.deepcopy(layer)
    for mine, theirs in zip(expected.parameters(), layer.parameters(), strict=True):
        mine.grad = None if theirs.grad is None else theirs.grad.clone()
    (0.05 * expected.weight.square().sum()).backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    FrobeniusDecay({"": 0.1}).register(optimizer, layer)
    optimizer.step()
    torch.testing.assert_close((layer.u.grad, layer.v.grad), (expected.u.grad, expected.v.grad))


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
    torch.testing.assert_close((layer.u.detach(), layer.v.detach()), (u, v))


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_step_within_autocast_decays(decoupled: bool) -> None:
    """As a step does that a user takes in `training_step`."""
    changed = []
    for is_mixed in (False, True):
        layer = layer_with_gradients([1.0, 1.0])
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        FrobeniusDecay({"": 0.5}, decoupled=decoupled).register(optimizer, layer)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed):
            optimizer.step()
        changed.append(layer.u.detach())
    u, v = (factor.detach().abs() for factor in (layer_with_gradients([1.0, 1.0]).u, layer.v))
    rounding = 4 * torch.finfo(torch.bfloat16).eps  # of the factors and of both products
    penalty = float((u @ (v @ v.T)).max())
    torch.testing.assert_close(changed[1], changed[0], rtol=0, atol=rounding * 0.1 * 0.5 * penalty)


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


OMEGA = [1.0, 3.0, 20.0]
TAU, BOUND = 5.0, 2.0


def terms(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """The first term is slow, the second is held by the bound of the weight, the third by that of the vectors."""
    generator = torch.Generator().manual_seed(seed)
    sizes = scale * torch.tensor([0.1, 1.0, 0.02], dtype=torch.float64)
    u, v = torch.randn(4, 3, generator=generator).double(), torch.randn(3, 5, generator=generator).double()
    return u * sizes, v * sizes[:, None], torch.tensor(OMEGA, dtype=torch.float64)


def batches(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        (torch.randn(8, 5, generator=generator).double(), torch.randn(8, 4, generator=generator).double())
        for _ in range(num)
    ]


def loaded(seed: int = 0, scale: float = 1.0) -> SpectralShardedLinear:
    layer = SpectralShardedLinear(5, 4, 3, bias=False, dtype=torch.float64)
    layer.load_terms(*terms(seed, scale))
    return layer


def start(module: nn.Module, optimizer: Any, tau: float = TAU, bound: float = BOUND) -> TermRates:
    """Begin a client's turn, in which the factors act before each step."""
    rates = TermRates(sharded_layers(module).values(), tau, bound)
    act = rates.acting(optimizer)
    optimizer.register_step_pre_hook(lambda *_: act())
    rates.start_client()
    return rates


def step(optimizer: Any, module: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    (module(batch[0]) - batch[1]).square().sum().backward()
    optimizer.step()


def slow_factors(u: Tensor, v: Tensor, tau: float, bound: float) -> list[float]:
    """In plain numbers."""
    found = []
    for i, omega in enumerate(OMEGA):
        speed = omega**2 * (sum(x**2 for x in u[:, i].tolist()) + sum(x**2 for x in v[i].tolist()))
        found.append(min(1.0, tau / omega, bound / speed))
    return found


def by_hand(
    held: tuple[Tensor, Tensor, Tensor], data: Sequence[tuple[Tensor, Tensor]], lr: float, momentum: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Vectors after each step of SGD, term by term, from the gradient of the squared error in the dense weight."""
    u, v, omega = (x.clone() for x in held)
    factors = slow_factors(u, v, TAU, BOUND)
    u_velocity, v_velocity = torch.zeros_like(u), torch.zeros_like(v)
    for x, y in data:
        weight = sum(omega[i] * torch.outer(u[:, i], v[i]) for i in range(3))
        gradient = 2 * (x @ weight.T - y).T @ x
        for i in range(3):
            u_velocity[:, i] = momentum * u_velocity[:, i] + factors[i] * omega[i] * gradient @ v[i]
            v_velocity[i] = momentum * v_velocity[i] + factors[i] * omega[i] * u[:, i] @ gradient
        u, v = u - lr * u_velocity, v - lr * v_velocity
        yield u, v


def test_every_bound_holds_a_term_and_one_term_is_free() -> None:
    """What the other tests rely on."""
    u, v, _ = terms(0)
    both, of_vectors, of_weight = (slow_factors(u, v, *b) for b in ((TAU, BOUND), (TAU, math.inf), (math.inf, BOUND)))
    assert both[0] == 1.0
    assert both[1] == of_weight[1] < of_vectors[1] == 1.0
    assert both[2] == of_vectors[2] < of_weight[2]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_computed_by_hand(momentum: float) -> None:
    layer, data = loaded(), batches(2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01, momentum=momentum)
    start(layer, optimizer)
    expected = list(by_hand(terms(0), data, lr=0.01, momentum=momentum))
    for batch, (u, v) in zip(data, expected, strict=True):
        step(optimizer, layer, batch)
        # float64: a thousand roundings
        torch.testing.assert_close((layer.u.detach(), layer.v.detach()), (u, v))
    without = loaded()  # negative control
    step(torch.optim.SGD(without.parameters(), lr=0.01), without, data[0])
    assert (without.u - expected[0][0]).abs().max() > 0.01 * expected[0][0].abs().max()


def test_factors_are_those_of_the_terms_at_the_start_of_each_turn() -> None:
    """They stay fixed while the terms grow, and the next client's terms have their own."""
    layer = loaded()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    rates = start(layer, optimizer)
    for seed, scale in ((0, 1.0), (1, 2.0), (2, 0.5)):
        layer.load_terms(*terms(seed, scale))
        rates.start_client()
        expected = torch.tensor(slow_factors(*terms(seed, scale)[:2], TAU, BOUND)).double()
        for _ in range(3):
            layer.u.grad, layer.v.grad = torch.ones_like(layer.u), torch.ones_like(layer.v)
            optimizer.step()
            torch.testing.assert_close(layer.u.grad, expected.expand(4, 3))
            torch.testing.assert_close(layer.v.grad, expected[:, None].expand(3, 5))
        now = torch.tensor(slow_factors(layer.u.detach(), layer.v.detach(), TAU, BOUND))
        assert not torch.allclose(now.double(), expected)


@pytest.mark.parametrize("tau", [5.0, math.inf])
def test_without_the_bound_every_step_is_that_of_the_other_hook_bit_for_bit(tau: float) -> None:
    ours, theirs = loaded(), loaded()
    one, two = (torch.optim.SGD(layer.parameters(), lr=0.01, momentum=0.9) for layer in (ours, theirs))
    start(ours, one, tau, math.inf)
    EffectiveLRClip(tau).register(two, theirs)
    for batch in batches(3):
        step(one, ours, batch)
        step(two, theirs, batch)
        assert torch.equal(ours.u, theirs.u)
        assert torch.equal(ours.v, theirs.v)
    assert bool((effective_lr_factors(ours.omega, tau) < 1).any()) is (tau == 5.0)


def test_what_another_optimizer_steps_stays_as_it_is() -> None:
    pair = nn.Sequential(loaded(), nn.Tanh(), copy.deepcopy(loaded()))
    first = torch.optim.SGD([pair[0].u], lr=0.0)
    start(pair, first)
    for parameter in pair.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    expected = torch.tensor(slow_factors(*terms(0)[:2], TAU, BOUND)).double()
    torch.testing.assert_close(pair[0].u.grad, expected.expand(4, 3))
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in [pair[0].v, pair[2].u, pair[2].v])


def test_factors_without_a_gradient_are_passed_by() -> None:
    layer = loaded()
    layer.u.requires_grad_(False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    start(layer, optimizer)
    step(optimizer, layer, batches(1)[0])
    assert layer.u.grad is None
    _, v = next(by_hand(terms(0), batches(1), lr=0.01))
    torch.testing.assert_close(layer.v.detach(), v)
