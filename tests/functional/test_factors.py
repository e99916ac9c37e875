import math

import pytest
import torch

from lightning_spectral.functional.spectra import (
    absorb,
    effective_lr_factors,
    factorize,
    frobenius_decay_gradients,
    num_terms_for,
    squared_frobenius_norm,
    weight_change,
)


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
    torch.testing.assert_close(squared_frobenius_norm(u, omega, v), norm)
    expected = torch.autograd.grad(norm / 2, (u, v))
    torch.testing.assert_close(frobenius_decay_gradients(u.detach(), omega, v.detach()), expected)


def test_effective_learning_rate_factor_is_one_up_to_tau() -> None:
    omega = torch.tensor([0.5, 1.0, 2.0, 4.0, 1e30])
    assert effective_lr_factors(omega, 2.0).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.5, 2e-30])
    assert effective_lr_factors(omega, math.inf).tolist() == [1.0] * 5
