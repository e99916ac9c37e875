import math

import pytest
import torch

from lightning_spectral.functional.factors import absorb, factorize, num_terms_for, weight_to_matrix
from lightning_spectral.functional.local_training import (
    effective_lr_factors,
    frobenius_decay_gradients,
    squared_frobenius_norm,
)
from lightning_spectral.functional.low_rank import weight_change

SHAPES = [(3, 7), (7, 3), (5, 5), (1, 4), (4, 1), (4, 3, 3, 3), (40, 3, 3, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_sum_to_the_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    U, s, Vh = factorize(weight)
    slow = sum(s[i] * torch.outer(U[:, i], Vh[i]) for i in range(len(s)))
    torch.testing.assert_close(slow, weight_to_matrix(weight).double(), rtol=0, atol=1e-13 * float(s[0]))
    identity, atol = torch.eye(len(s), dtype=torch.float64), max(torch.finfo(dtype).eps, 1e-13)
    torch.testing.assert_close(U.T @ U, identity, rtol=0, atol=atol)
    torch.testing.assert_close(Vh @ Vh.T, identity, rtol=0, atol=atol)
    assert torch.equal(s, s.sort(descending=True).values)


def test_absorbed_factors_share_the_singular_value_evenly() -> None:
    factors = factorize(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)))
    u, v = absorb(factors, torch.float64)
    torch.testing.assert_close(u.norm(dim=0) ** 2, factors.s)
    torch.testing.assert_close(v.norm(dim=1) ** 2, factors.s)


def test_zero_and_rank_deficient_weights_factorise() -> None:
    u, v = absorb(factorize(torch.zeros(3, 4)), torch.float32)
    assert torch.equal(u @ v, torch.zeros(3, 4))
    s = factorize(torch.ones(3, 4)).s
    assert float(s[1]) < 1e-12 * float(s[0])


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
    torch.testing.assert_close(squared_frobenius_norm(u, omega, v), norm)
    expected = torch.autograd.grad(norm / 2, (u, v))
    torch.testing.assert_close(frobenius_decay_gradients(u.detach(), omega, v.detach()), expected)


def test_effective_learning_rate_factor_is_one_up_to_tau() -> None:
    omega = torch.tensor([0.5, 1.0, 2.0, 4.0, 1e30])
    assert effective_lr_factors(omega, 2.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5, 2e-30])
    assert effective_lr_factors(omega, math.inf).tolist() == [1.0] * 5
