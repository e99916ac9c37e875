"""Singular terms: factorised against LAPACK, started against plain loops, trained against the operator of a step."""

import math
from itertools import starmap
from typing import NamedTuple

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_spectral.functional import spectra as factors_module
from lightning_spectral.functional.spectra import (
    TOLERANCE,
    Factors,
    absorb,
    concentrated_values,
    deviation_from_orthonormal,
    effective_lr_factors,
    factorize,
    frobenius_decay_products,
    gram_svd,
    is_concentrated,
    leading_factors,
    looks_random,
    num_terms_for,
    weight_change,
    weight_lr_factors,
    weight_to_matrix,
)

EPS = torch.finfo(torch.float64).eps


def lr_factors(u: Tensor, omega: Tensor, v: Tensor, bound: float) -> Tensor:
    return weight_lr_factors(u.square().sum(0) + v.square().sum(1), omega, bound)


def with_singular_values(values: Tensor, columns: int, seed: int) -> Tensor:
    """A matrix in float64 with these singular values, random singular vectors, and as many rows as values."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator, dtype=torch.float64)).Q
    return (left * values) @ right.T


def half_small(size: int, ratio: float) -> Tensor:
    """Half of the singular values are 1, half are ``ratio``.

    Rounding to single precision spreads each half a little. That is the worst case for a Gram matrix: small values that
    each have their own singular vectors, whereas exactly equal values would allow any rotation of these vectors.
    """
    return torch.where(torch.arange(size) < size // 2, 1.0, ratio).double()


def assert_factors(found: Factors, weight: Tensor) -> None:
    matrix = weight_to_matrix(weight).double()
    U, s, Vh = found
    rounding = matrix.numel() * EPS * float(matrix.norm())
    assert all(bool(torch.isfinite(part).all()) for part in found)
    assert float(((U * s) @ Vh - matrix).norm()) <= rounding
    assert max(deviation_from_orthonormal(U.T), deviation_from_orthonormal(Vh)) <= TOLERANCE
    assert bool((s.diff() <= 0).all())
    assert bool((s >= 0).all())
    left, values, _ = map(
        torch.from_numpy, scipy.linalg.svd(matrix.numpy(), full_matrices=False, lapack_driver="gesvd")
    )
    assert bool(((s - values).abs() <= TOLERANCE * values + rounding).all())
    assert_same_leading_space(U, left, values, TOLERANCE * float(values[0]) + rounding)


def assert_same_leading_space(U: Tensor, left: Tensor, values: Tensor, error: float) -> None:
    """Wedin (1972): the leading space, cut at the widest gap, rotates by at most error / gap if W is off by error."""
    if len(values) == 1:
        return
    gap, last = (values[:-1] - values[1:]).max(0)
    if float(gap) > 2 * error:
        rotation = torch.linalg.matrix_norm(project(U, int(last)) - project(left, int(last)), 2)
        assert float(rotation) <= error / (float(gap) - error) + TOLERANCE


def project(U: Tensor, last: int) -> Tensor:
    return U[:, : last + 1] @ U[:, : last + 1].T


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 40),
    decades=st.floats(0, 12),
    repeats=st.integers(1, 4),
    scale=st.integers(-100, 100),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=50, deadline=None)
def test_factors_of_any_shape_spectrum_and_scale(rows, columns, decades, repeats, scale, dtype, seed):
    size = min(rows, columns)
    exponents = torch.linspace(0, -decades, size, dtype=torch.float64)[(torch.arange(size) // repeats) * repeats]
    matrix = with_singular_values(10**exponents, max(rows, columns), seed) * 2.0**scale
    weight = (matrix if rows <= columns else matrix.T).to(dtype)
    assert_factors(factorize(weight), weight)


ODD_WEIGHTS = {
    "zero": torch.zeros(5, 9),
    "one entry": -3.0 * nn.functional.one_hot(torch.tensor(9), 24).float().view(6, 4),
    "rank one": torch.outer(torch.arange(1.0, 7.0), torch.arange(1.0, 12.0)),
    "zero columns": torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) * (torch.arange(9) % 2),
    "zero rows": torch.randn(6, 9, generator=torch.Generator().manual_seed(0)) * (torch.arange(6) % 2)[:, None],
    "duplicate rows": torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).repeat(2, 1),
    "identity": torch.eye(8),
    "Hadamard": 2.0 * torch.from_numpy(scipy.linalg.hadamard(8)).float(),
    "square, nearly singular": torch.ones(7, 7) + 1e-6 * torch.eye(7),
    "near the largest float": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 1e38,
    "subnormal": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) * 1e-42,
}


@pytest.mark.parametrize("weight", ODD_WEIGHTS.values(), ids=ODD_WEIGHTS)
def test_factors_of_odd_weights(weight: Tensor) -> None:
    assert_factors(factorize(weight), weight)
    assert_factors(factorize(weight.T), weight.T)


@pytest.mark.parametrize("shape", [(16, 8, 3, 3), (16, 8, 1, 1), (48, 16), (16, 48), (12, 4, 5)], ids=str)
def test_fresh_layers_take_the_fast_path(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=torch.Generator().manual_seed(0))
    expected = factorize(weight)
    monkeypatch.setattr(torch.linalg, "svd", lambda *args, **kwargs: pytest.fail("LAPACK was called"))
    again = factorize(weight)
    assert all(map(torch.equal, expected, again))  # and the same result each time
    assert_factors(again, weight)


def test_weights_in_float64_are_left_to_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors_module, "gram_svd", lambda matrix: pytest.fail("the Gram matrix was used"))
    weight = with_singular_values(half_small(16, 1e-3), 40, seed=0)
    U, _, Vh = factorize(weight)
    assert max(deviation_from_orthonormal(U.T), deviation_from_orthonormal(Vh)) < weight.numel() * EPS


def test_singular_values_lost_in_the_gram_matrix_are_left_to_lapack() -> None:
    """Läuchli's matrix: ones over a small diagonal, whose squares vanish next to one in the Gram matrix."""
    small = 2.0 ** -torch.tensor([27.0, 29.0, 31.0])
    weight, other = (torch.cat([torch.ones(3, 1), torch.diag(x)], dim=1) for x in (small, small / 4))
    products = [matrix.double() @ matrix.double().T for matrix in (weight, other)]
    assert torch.equal(*products)  # so anything computed from it is off by a factor of two for one of them
    assert gram_svd(weight.double()) is None
    assert_factors(factorize(weight), weight)


@pytest.mark.parametrize("columns", [32, 288])
def test_without_its_guard_the_fast_path_would_be_wrong(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = with_singular_values(half_small(32, 1e-6), columns, seed=0).float()
    assert gram_svd(weight.double()) is None
    assert_factors(factorize(weight), weight)
    monkeypatch.setattr(factors_module, "TOLERANCE", math.inf)
    U, s, Vh = gram_svd(weight.double())
    assert deviation_from_orthonormal(Vh) > 1000 * TOLERANCE
    true = torch.linalg.svdvals(weight.double())
    assert float(((s - true) / true).abs().max()) > 100 * TOLERANCE
    # The product is still right: checking it would not have revealed the error.
    torch.testing.assert_close((U * s) @ Vh, weight.double(), rtol=0, atol=weight.numel() * EPS)


@pytest.mark.parametrize("shape", [(8, 8), (32, 288), (64, 64)], ids=str)
def test_fast_path_gives_what_it_promises_or_nothing(shape: tuple[int, int]) -> None:
    ratios = torch.logspace(-2, -8, 25, dtype=torch.float64).tolist()
    weights = [with_singular_values(half_small(shape[0], ratio), shape[1], seed=1).float() for ratio in ratios]
    found = [gram_svd(weight.double()) for weight in weights]
    deviations = [deviation_from_orthonormal(parts[2]) for parts in found if parts is not None]
    assert 0 < len(deviations) < len(found)
    assert max(deviations) <= TOLERANCE


@given(angle=st.floats(0, 0.1), decades=st.floats(0, 6), seed=st.integers(0, 2**20))
@settings(max_examples=50, deadline=None)
def test_rows_nearly_orthogonal_bound_every_singular_value(angle: float, decades: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = with_singular_values(torch.ones(6, dtype=torch.float64), 9, seed)
    rows += angle * torch.randn(rows.shape, generator=generator, dtype=torch.float64) / 6
    rows /= rows.norm(dim=1, keepdim=True)
    lengths = torch.logspace(0, -decades, 6, dtype=torch.float64)
    true = torch.linalg.svdvals(lengths[:, None] * rows)
    bound = deviation_from_orthonormal(rows) + rows.numel() * EPS * 10**decades
    assert float((true / lengths - 1).abs().max()) <= bound


def test_eigenvectors_that_are_not_found_leave_the_work_to_lapack(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(matrix: Tensor) -> None:
        raise torch.linalg.LinAlgError("The algorithm failed to converge.")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    assert gram_svd(weight.double()) is None
    assert_factors(factorize(weight), weight)


def falling_after(num_terms: int, ratio: float, size: int) -> Tensor:
    """Singular values from 10 to 1, and after ``num_terms`` of them ``ratio`` to nearly nothing."""
    return torch.cat([torch.linspace(10, 1, num_terms), ratio * torch.linspace(1, 0.01, size - num_terms)]).double()


def assert_leading(found: tuple[Factors, float], weight: Tensor, num_terms: int) -> None:
    """They are terms of a matrix that differs from the weight by a rounding, and the largest of its terms."""
    (U, s, Vh), rest = found
    matrix = weight_to_matrix(weight).double()
    values = torch.linalg.svdvals(matrix)
    rounding = TOLERANCE * float(matrix.norm())
    assert max(deviation_from_orthonormal(U.T), deviation_from_orthonormal(Vh)) <= TOLERANCE
    assert float((matrix - (U * s) @ Vh).norm()) <= float(values[num_terms:].norm()) + rounding
    assert abs(rest - float(values[num_terms:].norm())) <= rounding
    assert float((s - values[:num_terms]).abs().max()) <= rounding  # Weyl
    left = torch.linalg.svd(matrix, full_matrices=False).U[:, :num_terms]
    gap = float(values[num_terms - 1]) - rest
    assert gap > 0
    assert float(torch.linalg.matrix_norm(U @ U.T - left @ left.T, 2)) <= rounding / gap + TOLERANCE  # Wedin, as above


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (32, 288), (288, 32)], ids=str)
def test_the_first_terms_alone_are_those_of_the_whole(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = with_singular_values(falling_after(6, 0.02, min(shape)), max(shape), seed=0).to(dtype)
    weight = weight if shape[0] <= shape[1] else weight.T
    found = leading_factors(weight, 6)
    assert found is not None
    assert_leading(found, weight, 6)
    again = leading_factors(weight, 6)
    assert again is not None
    assert all(map(torch.equal, found[0], again[0]))


@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 40),
    num_terms=st.integers(1, 8),
    decades=st.floats(0, 6),
    ratio=st.floats(0, 1),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_first_terms_are_right_or_none(rows, columns, num_terms, decades, ratio, seed):
    size = min(rows, columns)
    num_terms = min(num_terms, size)
    values = torch.logspace(0, -decades, size, dtype=torch.float64)
    values[num_terms:] *= ratio
    weight = with_singular_values(values, max(rows, columns), seed).float()
    weight = weight if rows <= columns else weight.T
    found = leading_factors(weight, num_terms)
    if found is not None:
        assert_leading(found, weight, num_terms)


def test_without_their_certificate_first_terms_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = with_singular_values(falling_after(6, 0.15, 64), 64, seed=0).float()
    assert leading_factors(weight, 6) is None
    monkeypatch.setattr(factors_module, "TOLERANCE", 1e-2)
    found = leading_factors(weight, 6)
    monkeypatch.undo()
    assert found is not None
    with pytest.raises(AssertionError):
        assert_leading(found, weight, 6)


def test_terms_that_are_too_small_for_orthonormal_vectors_are_left_to_the_whole_decomposition() -> None:
    """The products of vectors of terms of 1 and t are in error by the rounding of float64 over t^2."""
    accepted = 0
    for decades in range(1, 9):
        for seed in range(10):
            weight = with_singular_values(torch.logspace(0, -decades, 6, dtype=torch.float64), 24, seed).float()
            if (found := leading_factors(weight, 6)) is not None:
                accepted += 1
                assert_leading(found, weight, 6)
                for rows in (found[0].U.T, found[0].Vh):
                    assert torch.linalg.matrix_norm(rows @ rows.T - torch.eye(6).double()) <= 2 * TOLERANCE
    assert 20 <= accepted < 80


UNCERTAIN = {
    "flat": torch.eye(16),
    "random": torch.randn(16, 24, generator=torch.Generator().manual_seed(0)),
    "zero": torch.zeros(16, 24),
    "double precision": with_singular_values(falling_after(4, 0.01, 16), 24, seed=0),
    "NaN": torch.full((16, 24), torch.nan),
    "infinite": torch.full((16, 24), torch.inf),
}


@pytest.mark.parametrize("weight", UNCERTAIN.values(), ids=UNCERTAIN)
def test_where_first_terms_are_uncertain_there_are_none(weight: Tensor) -> None:
    assert leading_factors(weight, 4) is None


def test_absorbed_factors_share_the_singular_value_evenly() -> None:
    factors = factorize(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    u, v = absorb(factors, torch.float64)
    torch.testing.assert_close(u.norm(dim=0) ** 2, factors.s)
    torch.testing.assert_close(v.norm(dim=1) ** 2, factors.s)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_weight_that_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.ones(2, 2)
    weight[0, 1] = bad
    with pytest.raises(ValueError, match=r"must be finite, got NaN or infinity in shape \(2, 2\)"):
        factorize(weight)


@pytest.mark.parametrize("num_singular", [1, 7, 64, 100, 512])
@pytest.mark.parametrize("percent", [1, 7, 10, 20, 29, 40, 57, 60, 80, 100])
def test_number_of_terms_is_the_exact_ceiling(num_singular: int, percent: int) -> None:
    assert num_terms_for(num_singular, percent / 100) == -(-percent * num_singular // 100)


def test_weight_change_is_new_product_minus_old() -> None:
    generator = torch.Generator().manual_seed(0)
    u, v = torch.randn(5, 3, generator=generator).double(), torch.randn(3, 4, generator=generator).double()
    du, dv = torch.randn(5, 3, generator=generator).double(), torch.randn(3, 4, generator=generator).double()
    torch.testing.assert_close(weight_change(u, v, du, dv), (u + du) @ (v + dv) - u @ v)
    assert torch.equal(weight_change(u, v, 0 * du, 0 * dv), torch.zeros(5, 4).double())


def test_decay_gradients_are_those_of_the_materialised_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(6, 3, generator=generator).double().requires_grad_()
    v = torch.randn(3, 8, generator=generator).double().requires_grad_()
    omega = torch.tensor([1.0, 2.0, 10.0]).double()
    norm = ((u * omega) @ v).square().sum()
    expected = torch.autograd.grad(norm / 2, (u, v))
    products = frobenius_decay_products(u.detach(), omega, v.detach())
    torch.testing.assert_close(tuple(starmap(torch.mm, products)), expected)


def test_effective_learning_rate_factor_is_one_up_to_tau() -> None:
    omega = torch.tensor([0.5, 1.0, 2.0, 4.0, 1e30])
    assert effective_lr_factors(omega, 2.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5, 2e-30])
    assert effective_lr_factors(omega, math.inf).tolist() == [1.0] * 5


SHAPES = [(64, 576), (300, 20), (48, 48), (8, 8), (12, 6), (2, 30)]
NUM_SEEDS = 100


def gaussian(shape: tuple[int, int], seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def uniform(shape: tuple[int, int], seed: int) -> Tensor:
    """The initialisation of `nn.Linear` and the convolutions."""
    bound = shape[1] ** -0.5
    return bound * (2 * torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) - 1)


def orthogonal(shape: tuple[int, int], seed: int) -> Tensor:
    return nn.init.orthogonal_(torch.empty(shape, dtype=torch.float64), generator=torch.Generator().manual_seed(seed))


def spectrum(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix)


def seems_random(matrix: Tensor) -> bool:
    return looks_random(spectrum(matrix), tuple(matrix.shape))


@pytest.mark.parametrize("tail", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(("shape", "n"), [((5, 9), 2), ((9, 5), 1), ((6, 6), 5), ((1, 4), 1)])
def test_values_are_those_of_a_plain_loop(shape: tuple[int, int], n: int, tail: float) -> None:
    values = np.linalg.svd(gaussian(shape, seed=0).numpy(), compute_uv=False)
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
    assert torch.equal(concentrated_values(0 * values, n, tail), 0 * values)


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


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tail", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(8, 8), (12, 12), (64, 64), (16, 144)], ids=str)
@pytest.mark.parametrize("keep", [0.2, 0.5])
def test_a_concentrated_spectrum_is_known_as_such_and_a_random_one_is_not(shape, keep, tail):
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


@pytest.mark.sampled(4)
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
    assert not seems_random(torch.zeros(5, 7))


def test_the_unit_does_not_matter() -> None:
    for factor in (1e-30, 1e30):
        assert seems_random(factor * gaussian((20, 30), seed=0))
        assert not seems_random(factor * (gaussian((20, 30), seed=0) + 1))


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


def test_without_a_bound_the_fastest_direction_pairs_the_largest_left_with_the_largest_right_vector(drawn):
    """u_i v_j^T is an eigenvector with omega_i^2 |u_i|^2 + omega_j^2 |v_j|^2, for every i and j."""
    pairs = [float(left + right) for left in drawn.of_left for right in drawn.of_right]
    free = lr_factors(*drawn, math.inf)
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
    free, fastest = float(drawn.speeds.max()), largest_rate(drawn, lr_factors(*drawn, bound))
    assert fastest <= bound * (1 + rounding(drawn))
    assert fastest == pytest.approx(min(bound, free), rel=rounding(drawn), abs=0)


def test_the_fastest_directions_are_bounded_in_some_cases_and_left_in_others() -> None:
    """Negative control of the test above: both sides of its minimum occur, and without the bound it would fail."""
    free = [float(orthogonal_terms(*shape, seed).speeds.max()) for shape in CASES for seed in range(3)]
    for bound in (1.0, 30.0):
        assert any(speed > 2 * bound for speed in free)
    assert any(speed < 30.0 for speed in free)


@pytest.mark.parametrize("bound", [0.1, 1.0, 30.0])
def test_slow_terms_are_left_exactly_as_they_were_and_fast_ones_brought_to_the_bound(drawn, bound):
    for i, factor in enumerate(lr_factors(*drawn, bound).tolist()):
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
        matrix = operator(held, lr_factors(*held, 1.0))
        torch.testing.assert_close(matrix, torch.eye(16).double(), rtol=0, atol=rounding(held))
    without = operator(fast, torch.ones(4).double())  # negative control
    torch.testing.assert_close(without, 100 * torch.eye(16).double(), rtol=0, atol=100 * rounding(fast))


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_where_the_two_vectors_differ_in_length_a_direction_is_at_most_twice_as_fast(shape):
    terms = orthogonal_terms(*shape, seed=1, balanced=False)
    assert largest_rate(terms, lr_factors(*terms, 1.0)) <= 2 * (1 + rounding(terms))


def test_twice_as_fast_is_reached() -> None:
    """All of one term's speed is in its left vector, and all of the other's in its right one."""
    lengths = torch.tensor([1e3, 1e-3]).double()
    terms = Terms(torch.diag(lengths), torch.ones(2).double(), torch.diag(lengths.flip(0)))
    # the other vectors have a share of 1e-12 in the speeds
    assert largest_rate(terms, lr_factors(*terms, 1.0)) == pytest.approx(2.0, rel=2e-12, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bound", [1.0, math.inf])
def test_terms_of_size_zero_and_huge_multipliers_have_factors(dtype: torch.dtype, bound: float) -> None:
    """The square of a multiplier may be beyond the type, where the factor is not."""
    largest = torch.finfo(dtype).max
    omega = torch.tensor([1.0, largest**0.5 * 4, largest / 2], dtype=dtype)
    factors = lr_factors(torch.zeros(2, 3, dtype=dtype), omega, torch.zeros(3, 2, dtype=dtype), bound)
    assert torch.equal(factors, torch.ones(3, dtype=dtype))
    u = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.25, 0.25]], dtype=dtype)
    factors = lr_factors(u, omega, u.T, bound)
    speeds = [2 * w * w * s for w, s in zip(omega.double().tolist(), (4, 1 / 16, 1 / 16), strict=True)]
    expected = [min(1.0, bound / speed) for speed in speeds]
    # a root, a product and two divisions round; the smallest factor may be below what the type holds
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    assert factors.tolist() == pytest.approx(expected, rel=8 * eps, abs=tiny)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_a_bound_that_is_not_positive_is_refused_with_the_remedy(bound: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"`bound` must be positive, got .*use float\('inf'\) for no bound"):
        lr_factors(one, torch.ones(1), one, bound)
