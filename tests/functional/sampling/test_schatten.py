import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from lightning_spectral.functional import proportional_inclusion_probs, schatten_inclusion_probs


def bound(s: np.ndarray, pi: np.ndarray, p: float) -> float:
    """Eq. (10) of the paper, inside the root."""
    return float((s**p * (1 - pi + pi * (1 / np.maximum(pi, 1e-300) - 1) ** p))[s > 0].sum())


@pytest.mark.parametrize(("num_singular", "n", "p"), [(6, 2, 4), (8, 3, 3), (8, 7, 4), (10, 4, 6), (12, 3, 4)])
def test_no_constrained_optimiser_finds_better(num_singular: int, n: int, p: float) -> None:
    rng = np.random.default_rng(0)
    s = rng.random(num_singular) + 0.05
    ours = bound(s, schatten_inclusion_probs(torch.tensor(s), n, p).numpy(), p)
    for _ in range(4):
        start = np.clip(rng.dirichlet(np.ones(num_singular)) * n, 0.01, 0.99)
        theirs = minimize(
            lambda pi: bound(s, pi, p),
            start,
            bounds=[(1e-6, 1.0)] * num_singular,
            constraints={"type": "eq", "fun": lambda pi: pi.sum() - n},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert ours <= theirs.fun * (1 + 1e-12)


@given(
    logs=st.lists(st.floats(-15, 0), min_size=2, max_size=30),
    zeros=st.integers(0, 3),
    ties=st.booleans(),
    share=st.floats(0.0, 1.0),
    p=st.sampled_from([2.0, 2.5, 4.0, 8.0]),
)
@settings(deadline=None, max_examples=30)
def test_kkt_conditions_hold(logs: list[float], zeros: int, ties: bool, share: float, p: float) -> None:
    values = [10.0**x for x in (logs + logs[:2] if ties else logs)] + [0.0] * zeros
    s = torch.tensor(values, dtype=torch.float64)
    n = 1 + int(share * (len(values) - 2))
    pi = schatten_inclusion_probs(s, n, p)
    assert abs(float(pi.sum()) - n) < 1e-9
    assert bool(((pi >= 0) & (pi <= 1)).all())
    order = s.argsort(descending=True, stable=True)
    assert bool((pi[order].diff() <= 1e-9).all())
    inner = (pi > 1e-9) & (pi < 1 - 1e-3) & (s > 0)
    x = 1 / pi[inner] - 1
    log_price = p * s[inner].log() + (1 + p * x ** (p - 1) + (p - 1) * x**p).log()
    if len(log_price) > 1:  # all inner terms have the same price
        assert float(log_price.max() - log_price.min()) < 1e-6
    if int((s > 0).sum()) > n:  # otherwise the first zero terms fill up, and flipping changes which those are
        torch.testing.assert_close(schatten_inclusion_probs(7.5 * s.flip(0), n, p).flip(0), pi, rtol=1e-9, atol=1e-7)


def test_order_two_is_unbiased() -> None:
    s = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(schatten_inclusion_probs(s, 30, 2.0), proportional_inclusion_probs(s, 30))


def test_small_terms_are_proportional_for_any_order() -> None:
    s = torch.tensor([1.0] * 9 + [1e-3, 2e-3, 4e-3], dtype=torch.float64)
    for p in (2.0, 4.0, 8.0):
        pi = schatten_inclusion_probs(s, 3, p)
        torch.testing.assert_close(pi[9:] / pi[9], torch.tensor([1.0, 2.0, 4.0]).double(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("p", [1.0, float("nan"), float("inf")])
def test_order_out_of_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="`p` must be at least 2 and finite"):
        schatten_inclusion_probs(torch.ones(3).double(), 1, p)
