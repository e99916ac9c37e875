"""Tucker-2 factors against NumPy, and their layer against three convolutions in a row."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from small_convs import CONV, rand
from torch import nn

import lightning_spectral as ls
from lightning_spectral.nn import TuckerConv, replace_layers
from lightning_spectral.nn.layers.tucker import compose, tucker_factors, tucker_ranks

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@pytest.mark.parametrize("dims", CONVS)
@pytest.mark.parametrize(("a", "b"), [(3, 4), (1, 1), (5, 7)])
def test_factors_are_the_higher_order_svd_of_numpy(dims: int, a: int, b: int) -> None:
    """Up to the signs of vectors, which projections do not have; and of the weight's norm."""
    weight = rand(7, 5, *(3, 2, 2)[:dims])
    down, core, up = tucker_factors(weight, a, b)
    whole = weight.numpy()
    left = np.linalg.svd(whole.reshape(7, -1), full_matrices=False)[0][:, :b]
    right = np.linalg.svd(np.moveaxis(whole, 1, 0).reshape(5, -1), full_matrices=False)[0][:, :a]
    projected = np.einsum("op,pi...,ij->oj...", left @ left.T, whole, right @ right.T)
    projected *= np.linalg.norm(whole) / np.linalg.norm(projected)
    assert (down.shape, core.shape, up.shape) == ((a, 5), (b, a, *weight.shape[2:]), (7, b))
    np.testing.assert_allclose(compose(down, core, up).numpy(), projected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(up.numpy() @ up.numpy().T, left @ left.T, rtol=0, atol=1e-12)
    for fewer, all_of_them in zip(tucker_factors(weight, 1, 1)[::2], (down[:1], up[:, :1]), strict=True):
        assert torch.equal(fewer, all_of_them)  # leading parts are those for fewer channels


def test_a_weight_of_zeros_has_factors() -> None:
    assert all(torch.isfinite(factor).all() for factor in tucker_factors(torch.zeros(4, 3, 3), 2, 2))


def num_values(shape: tuple[int, ...], a: int, b: int) -> int:
    return a * shape[1] + a * b * math.prod(shape[2:]) + b * shape[0]


@pytest.mark.parametrize("shape", [(64, 32, 3, 3), (32, 64, 3, 3), (16, 16, 5), (8, 24, 2, 2, 2), (40, 3, 3, 3)])
def test_ranks_are_the_largest_within_the_values_of_the_terms(shape: tuple[int, ...]) -> None:
    most, before = min(shape[0], math.prod(shape[1:])), (1, 1)
    for n in range(1, most + 1):
        a, b = tucker_ranks(shape, n)
        assert a >= before[0]
        assert b >= before[1]
        before = a, b
        if (a, b) == (shape[1], shape[0]):
            continue
        terms = n * (math.prod(shape[1:]) + shape[0])
        assert num_values(shape, a, b) <= terms or (a, b) == (1, 1)
        assert num_values(shape, max(1, round((b + 1) * shape[1] / shape[0])), b + 1) > terms
        assert abs(a / shape[1] - b / shape[0]) <= max(0.5 / shape[1], 1 / shape[1] - b / shape[0])
    assert before == (shape[1], shape[0])


@pytest.mark.parametrize("options", CONV, ids=str)
@pytest.mark.parametrize("dims", CONVS)
def test_the_layer_is_three_convolutions(dims: int, options: dict[str, Any]) -> None:
    """Outputs and gradients, of one example as well; at full size, those of the dense layer."""
    conv: Any = CONVS[dims]
    dense, x = conv(6, 8, **options).double(), rand(2, 6, *(7, 6, 6)[:dims])
    layer = TuckerConv.from_dense(dense, 3)
    a, b = layer.ranks
    inner = {**options, "bias": False}
    three = nn.Sequential(conv(6, a, 1, bias=False), conv(a, b, **inner), conv(b, 8, 1, bias=layer.bias is not None))
    three.double()
    with torch.no_grad():
        for own, factor in zip(three, (layer.down, layer.core, layer.up), strict=True):
            own.weight.copy_(factor.view(own.weight.shape))
        if layer.bias is not None:
            three[2].bias.copy_(layer.bias)
    out = layer(x)
    torch.testing.assert_close(out, three(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(layer(x[0]), three(x[0]), rtol=1e-10, atol=1e-10)
    out.square().sum().backward()
    three(x).square().sum().backward()
    for own, factor in zip(three, (layer.down, layer.core, layer.up), strict=True):
        torch.testing.assert_close(factor.grad, own.weight.grad.view(factor.shape), rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(conv(6, 8, **options).double()._conv_forward(x, layer.weight, layer.bias), out)
        torch.testing.assert_close(TuckerConv.from_dense(dense, 8)(x), dense(x), rtol=1e-10, atol=1e-10)


def test_its_weight_can_be_read_but_not_written() -> None:
    net = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 2, 1))
    small: Any = replace_layers(net, 0.4, layers=ls.LayerChoices(convolutions="tucker"))
    assert small[1].weight.shape == net[1].weight.shape
    for write in (lambda: small[1].weight.data.clamp_(0), lambda: setattr(small[1], "weight", net[1].weight)):
        with pytest.raises(RuntimeError, match=r"`1\.weight` cannot be written on a client"):
            write()


def test_a_plan_says_which_layers_are_held_so() -> None:
    layers = [
        nn.Conv2d(3, 6, 3),
        nn.Conv2d(6, 6, 3),
        nn.Conv2d(6, 6, 1),
        nn.Conv2d(6, 6, 3, groups=2),
        nn.Conv2d(6, 2, 1),
    ]
    plan = ls.nn.plan_layers(nn.Sequential(*layers), choices=ls.LayerChoices(convolutions="tucker"))
    assert list(plan.tucker) == ["1"]
    assert list(plan.blocks) == ["2", "3.blocks.0", "3.blocks.1"]
    assert plan.sharded_weights == ("1.weight", "2.weight", "3.weight")
    assert "Tucker factors" in str(plan)
    assert not plan.keeping_dense(["1.weight"], "so").tucker


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"`convolutions` must be 'matrix', 'spatial' or 'tucker', got 'Tucker'"):
        ls.LayerChoices(convolutions="Tucker")
    with pytest.raises(ValueError, match=r"`output_ratio=0\.5` cuts the outputs of matrices"):
        ls.LayerChoices(convolutions="tucker", output_ratio=0.5)
