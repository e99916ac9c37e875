"""Factors through the Gram matrix, against LAPACK in float64. EPS and TOLERANCE are the two precisions.

LAPACK promises errors of a modest multiple of EPS times the largest singular value; here ``rounding`` is N M of them,
times the Frobenius norm.
"""

import math

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
    deviation_from_orthonormal,
    factorize,
    gram_svd,
    weight_to_matrix,
)

EPS = torch.finfo(torch.float64).eps


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
@settings(max_examples=300, deadline=None)
def test_factors_of_any_shape_spectrum_and_scale(
    rows: int, columns: int, decades: float, repeats: int, scale: int, dtype: torch.dtype, seed: int
) -> None:
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
    generator = torch.Generator().manual_seed(0)
    weight = nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)
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
@settings(max_examples=100, deadline=None)
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
