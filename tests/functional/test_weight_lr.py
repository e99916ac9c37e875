"""The bound on the learning rate of the weight, against the operator that takes a gradient to the change of a weight.

One step of gradient descent on u and v, with learning rate 1 and the gradient G of the weight, changes the weight
u diag(omega) v to first order by a linear function of G. Its matrix is built here column by column, and its eigenvalues
are the learning rates of the directions of the weight. For a dense layer it is the identity.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.spectra import weight_lr_factors

EPS = torch.finfo(torch.float64).eps


class Terms(NamedTuple):
    u: Tensor
    omega: Tensor
    v: Tensor

    @property
    def of_left(self) -> Tensor:
        return self.omega.square() * self.u.square().sum(0)

    @property
    def of_right(self) -> Tensor:
        return self.omega.square() * self.v.square().sum(1)

    @property
    def speeds(self) -> Tensor:
        return self.of_left + self.of_right


def orthogonal_terms(rows: int, columns: int, n: int, seed: int, balanced: bool = True) -> Terms:
    """Sizes and multipliers over several orders of magnitude; if ``balanced``, |u_i| = |v_i| as in terms just drawn."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, n, generator=generator).double() for size in (rows, columns))
    spread = torch.randn(3, n, generator=generator).double()
    u_norm = (2 * spread[0]).exp()
    v_norm = u_norm if balanced else (2 * spread[2]).exp()
    return Terms(torch.linalg.qr(left).Q * u_norm, spread[1].exp(), (torch.linalg.qr(right).Q * v_norm).T)


def operator(terms: Terms, factors: Tensor) -> Tensor:
    """The matrix of G -> -(change of W), one entry of G after the other, by autograd and the product rule."""
    rows, columns = len(terms.u), terms.v.shape[1]
    images = []
    for entry in range(rows * columns):
        gradient = torch.zeros(rows * columns).double()
        gradient[entry] = 1.0
        u, v = terms.u.clone().requires_grad_(), terms.v.clone().requires_grad_()
        loss = (gradient.view(rows, columns) * ((u * terms.omega) @ v)).sum()
        of_u, of_v = torch.autograd.grad(loss, (u, v))
        du, dv = of_u * factors, of_v * factors[:, None]
        images.append(((du * terms.omega) @ terms.v + (terms.u * terms.omega) @ dv).flatten())
    return torch.stack(images, dim=1)


def largest_rate(terms: Terms, factors: Tensor) -> float:
    """The largest eigenvalue of the operator, whose matrix is symmetric."""
    matrix = operator(terms, factors)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=rounding(terms) * float(matrix.abs().max()))
    return float(torch.linalg.eigvalsh(matrix)[-1])


def rounding(terms: Terms) -> float:
    """Relative to the largest eigenvalue: dimension x eps each for orthogonality, entries, factors and eigenvalues."""
    return 4 * len(terms.u) * terms.v.shape[1] * EPS


CASES = [(4, 6, 4), (6, 4, 3), (5, 5, 1), (3, 5, 2), (5, 5, 5)]


@pytest.fixture(params=[(*shape, seed) for shape in CASES for seed in range(3)], ids=str)
def drawn(request: pytest.FixtureRequest) -> Terms:
    return orthogonal_terms(*request.param)


def test_without_a_bound_the_fastest_direction_pairs_the_largest_left_with_the_largest_right_vector(
    drawn: Terms,
) -> None:
    """u_i v_j^T is an eigenvector with omega_i^2 |u_i|^2 + omega_j^2 |v_j|^2, for every i and j."""
    pairs = [float(left + right) for left in drawn.of_left for right in drawn.of_right]
    free = weight_lr_factors(*drawn, math.inf)
    assert torch.equal(free, torch.ones_like(drawn.omega))
    assert largest_rate(drawn, free) == pytest.approx(max(pairs), rel=rounding(drawn), abs=0)
    matrix = operator(drawn, free)
    for i, left in enumerate(drawn.of_left):
        for j, right in enumerate(drawn.of_right):
            direction = torch.outer(drawn.u[:, i] / drawn.u[:, i].norm(), drawn.v[j] / drawn.v[j].norm()).flatten()
            expected = (left + right) * direction
            torch.testing.assert_close(matrix @ direction, expected, rtol=0, atol=rounding(drawn) * max(pairs))


@pytest.mark.parametrize("bound", [0.1, 1.0, 30.0])
def test_with_a_bound_no_direction_is_faster_and_the_fastest_term_is_as_fast(drawn: Terms, bound: float) -> None:
    free, fastest = float(drawn.speeds.max()), largest_rate(drawn, weight_lr_factors(*drawn, bound))
    assert fastest <= bound * (1 + rounding(drawn))
    assert fastest == pytest.approx(min(bound, free), rel=rounding(drawn), abs=0)


def test_the_fastest_directions_are_bounded_in_some_cases_and_left_in_others() -> None:
    """Negative control of the test above: both sides of its minimum occur, and without the bound it would fail."""
    free = [float(orthogonal_terms(*shape, seed).speeds.max()) for shape in CASES for seed in range(3)]
    for bound in (1.0, 30.0):
        assert any(speed > 2 * bound for speed in free)
    assert any(speed < 30.0 for speed in free)


@pytest.mark.parametrize("bound", [0.1, 1.0, 30.0])
def test_slow_terms_are_left_exactly_as_they_were_and_fast_ones_brought_to_the_bound(
    drawn: Terms, bound: float
) -> None:
    factors = weight_lr_factors(*drawn, bound)
    for i, factor in enumerate(factors.tolist()):
        # a slow oracle in plain numbers; each of the sums below rounds at most once per entry
        lengths = sum(x * x for x in drawn.u[:, i].tolist()) + sum(x * x for x in drawn.v[i].tolist())
        speed = float(drawn.omega[i]) ** 2 * lengths
        assert factor == 1.0 if speed <= bound else factor == pytest.approx(bound / speed, rel=rounding(drawn), abs=0)


def test_a_dense_layer_has_learning_rate_one_in_every_direction() -> None:
    """All terms of an orthogonal matrix whose speed is the bound: a bounded step is the dense one, to first order."""
    terms = orthogonal_terms(4, 4, 4, seed=0)
    slow = Terms(terms.u * 0.5**0.5 / terms.u.norm(dim=0), torch.ones(4).double(), terms.v)
    even = Terms(slow.u, slow.omega, slow.v * 0.5**0.5 / slow.v.norm(dim=1)[:, None])
    fast = Terms(10 * even.u, even.omega, 10 * even.v)
    for held in (even, fast):
        matrix = operator(held, weight_lr_factors(*held, 1.0))
        torch.testing.assert_close(matrix, torch.eye(16).double(), rtol=0, atol=rounding(held))
    without = operator(fast, torch.ones(4).double())  # negative control
    torch.testing.assert_close(without, 100 * torch.eye(16).double(), rtol=0, atol=100 * rounding(fast))


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_where_the_two_vectors_differ_in_length_a_direction_is_at_most_twice_as_fast(
    shape: tuple[int, int, int],
) -> None:
    terms = orthogonal_terms(*shape, seed=1, balanced=False)
    assert largest_rate(terms, weight_lr_factors(*terms, 1.0)) <= 2 * (1 + rounding(terms))


def test_twice_as_fast_is_reached() -> None:
    """All of one term's speed is in its left vector, and all of the other's in its right one."""
    lengths = torch.tensor([1e3, 1e-3]).double()
    terms = Terms(torch.diag(lengths), torch.ones(2).double(), torch.diag(lengths.flip(0)))
    # the other vectors have a share of 1e-12 in the speeds
    assert largest_rate(terms, weight_lr_factors(*terms, 1.0)) == pytest.approx(2.0, rel=2e-12, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_terms_of_size_zero_and_huge_multipliers_have_factors(dtype: torch.dtype, bound: float) -> None:
    """The square of a multiplier may be beyond the type, where the factor is not."""
    largest = torch.finfo(dtype).max
    omega = torch.tensor([1.0, largest**0.5 * 4, largest / 2], dtype=dtype)
    factors = weight_lr_factors(torch.zeros(2, 3, dtype=dtype), omega, torch.zeros(3, 2, dtype=dtype), bound)
    assert torch.equal(factors, torch.ones(3, dtype=dtype))
    u = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.25, 0.25]], dtype=dtype)
    factors = weight_lr_factors(u, omega, u.T, bound)
    speeds = [2 * w * w * s for w, s in zip(omega.double().tolist(), (4, 1 / 16, 1 / 16), strict=True)]
    expected = [min(1.0, bound / speed) for speed in speeds]
    # a root, a product and two divisions round; the smallest factor may be below what the type holds
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert factors.tolist() == pytest.approx(expected, rel=8 * eps, abs=tiny)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused_with_the_remedy(bound: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"`bound` must be positive, got .*use float\('inf'\) for no bound"):
        weight_lr_factors(one, torch.ones(1), one, bound)
