"""The spectrum of a start against plain loops, and what passes for random: no false alarms, clear cases detected."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_spectral.functional.spectra import concentrated_values, is_concentrated, looks_random

EPS = torch.finfo(torch.float64).eps
SHAPES = [(64, 576), (300, 20), (48, 48), (8, 8), (12, 6), (2, 30)]
NUM_SEEDS = 100


def gaussian(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniform(shape: tuple[int, int], seed: int) -> Tensor:
    """The initialisation of `nn.Linear` and the convolutions."""
    bound = shape[1] ** -0.5
    weight = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return bound * (2 * weight - 1)


def orthogonal(shape: tuple[int, int], seed: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(shape, dtype=torch.float64), generator=torch.Generator().manual_seed(seed))


def spectrum(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix)


def seems_random(matrix: Tensor) -> bool:
    return looks_random(spectrum(matrix), tuple(matrix.shape))


@pytest.mark.parametrize("tail", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(("shape", "n"), [((5, 9), 2), ((9, 5), 1), ((6, 6), 5), ((1, 4), 1)])
def test_values_are_those_of_a_plain_loop(shape: tuple[int, int], n: int, tail: float) -> None:
    matrix = gaussian(shape, seed=0)
    values = np.linalg.svd(matrix.numpy(), compute_uv=False)
    slow, before, after = [], 0.0, 0.0
    for i, value in enumerate(values):
        slow.append(value if i < n else tail * value)
        before += value**2
        after += slow[-1] ** 2
    slow = [value * math.sqrt(before / after) for value in slow]
    found = concentrated_values(torch.from_numpy(values), n, tail)
    # two sums of N squares, two roots, a quotient and two products: less than 2 N + 8 roundings each
    rtol = (2 * len(values) + 8) * EPS
    torch.testing.assert_close(found, torch.tensor(slow, dtype=torch.float64), rtol=rtol, atol=0)


@pytest.mark.parametrize(("n", "tail"), [(3, 1.0), (8, 0.1), (8, 0.0)])
def test_with_nothing_to_move_values_stay(n: int, tail: float) -> None:
    values = spectrum(gaussian((8, 9), seed=3))
    assert torch.equal(concentrated_values(values, n, tail), values)  # the quotient of two equal norms is one


def test_zeros_stay_zero() -> None:
    zeros = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(concentrated_values(zeros, 2, 0.0), zeros)


@pytest.mark.parametrize("function", [concentrated_values, is_concentrated])
@pytest.mark.parametrize(
    ("values", "n", "tail", "message"),
    [
        ([2.0, 1.0], 0, 0.1, r"`num_terms` must be in \[1, N=2\], got 0"),
        ([2.0, 1.0], 3, 0.1, r"`num_terms` must be in \[1, N=2\], got 3"),
        ([2.0, 1.0], 1, -0.1, r"`tail` must be in \[0, 1\], got -0.1"),
        ([2.0, 1.0], 1, 1.1, r"`tail` must be in \[0, 1\], got 1.1"),
        ([2.0, 1.0], 1, math.nan, r"`tail` must be in \[0, 1\], got nan"),
        ([2.0, math.nan], 1, 0.1, "got nan at index 1"),
        ([2.0, -1.0], 1, 0.1, "got -1.0 at index 1"),
    ],
)
def test_out_of_range_is_an_error(function, values, n, tail, message):
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(values, dtype=torch.float64), n, tail)


@pytest.mark.parametrize("tail", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(8, 8), (12, 12), (64, 64), (16, 144)], ids=str)
@pytest.mark.parametrize("keep", [0.2, 0.5])
def test_a_concentrated_spectrum_is_known_as_such_and_a_random_one_is_not(
    shape: tuple[int, int], keep: float, tail: float
) -> None:
    n = math.ceil(keep * min(shape))
    for seed in range(NUM_SEEDS):
        values = spectrum(gaussian(shape, seed))
        assert is_concentrated(concentrated_values(values, n, tail), n, tail)
        gap = float(values[n] / values[n - 1])
        assert is_concentrated(values, n, tail) == (gap <= tail)
        assert tail == 0.5 or gap > tail  # negative control: at f = 0.1, no random spectrum has such a gap by itself


def test_a_matrix_that_is_rounded_after_the_start_is_known_as_such() -> None:
    """Weyl: no singular value moves by more than the norm of the rounding errors."""
    for seed in range(20):
        U, s, Vh = torch.linalg.svd(gaussian((30, 40), seed), full_matrices=False)
        for dtype in (torch.float32, torch.bfloat16):
            for tail in (0.0, 0.1):
                rounded = ((U * concentrated_values(s, 6, tail)) @ Vh).to(dtype).double()
                assert is_concentrated(spectrum(rounded), 6, tail, torch.finfo(dtype).eps)
                assert not is_concentrated(s, 6, tail, torch.finfo(dtype).eps)


@pytest.mark.parametrize("make", [gaussian, uniform, orthogonal])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_random_matrix_is_taken_for_trained(make, shape):
    assert all(seems_random(make(shape, seed)) for seed in range(NUM_SEEDS))


@pytest.mark.parametrize("shape", [(64, 576), (300, 20), (48, 48), (12, 60)], ids=str)
def test_a_spike_is_seen_where_theory_says_it_leaves_the_bulk(shape: tuple[int, int]) -> None:
    r"""Noise of variance one and theta u v^T: the largest eigenvalue tends to (theta^2 + m)(theta^2 + k) / theta^2."""
    rows, columns = shape
    for seed in range(NUM_SEEDS):
        noise = gaussian(shape, seed)
        u, v = gaussian((rows, 1), seed + 1000), gaussian((1, columns), seed + 2000)
        direction = u @ v / (u.norm() * v.norm())
        threshold = (rows * columns) ** 0.25
        assert not seems_random(noise + 3 * threshold * direction)
        assert seems_random(noise + 0.3 * threshold * direction)  # negative control: below it nothing can be seen


@pytest.mark.parametrize(("shape", "keep"), [((64, 576), 0.5), ((64, 64), 0.2), ((12, 120), 0.2), ((32, 32), 0.2)])
def test_a_matrix_looks_trained_after_a_start(shape: tuple[int, int], keep: float) -> None:
    n = math.ceil(keep * min(shape))
    for seed in range(NUM_SEEDS):
        values = spectrum(gaussian(shape, seed))
        assert looks_random(values, shape)
        assert not looks_random(concentrated_values(values, n, 0.1), shape)


def test_weights_look_trained_after_a_few_steps() -> None:
    """A regression on three directions: with a step of about one over the curvature, each step adds to them."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(40, 60, bias=False)
    nn.init.kaiming_uniform_(linear.weight, a=5**0.5, generator=generator)
    x = torch.randn(400, 40, generator=generator)
    target = x @ torch.randn(40, 3, generator=generator) @ torch.randn(3, 60, generator=generator)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.2)
    seen = [seems_random(linear.weight.detach())]
    for _ in range(5):
        optimizer.zero_grad()
        (0.5 * (linear(x) - target).square().sum(1).mean()).backward()
        optimizer.step()
        seen.append(seems_random(linear.weight.detach()))
    assert seen == [True, False, False, False, False, False]


@pytest.mark.parametrize("shape", [(1, 9), (9, 1), (1, 1)])
def test_a_single_row_or_column_has_nothing_to_weigh(shape: tuple[int, int]) -> None:
    assert not seems_random(gaussian(shape, seed=0))


def test_a_matrix_of_zeros_is_not_random() -> None:
    assert not seems_random(torch.zeros(5, 7))


def test_the_unit_does_not_matter() -> None:
    for factor in (1e-30, 1e30):
        assert seems_random(factor * gaussian((20, 30), seed=0))
        assert not seems_random(factor * (gaussian((20, 30), seed=0) + 1))
