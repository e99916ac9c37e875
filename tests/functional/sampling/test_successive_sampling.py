"""Successive sampling and Manly's approximation against enumeration of all orders, a fine quadrature, and numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import SUCCESSIVE, excess, successive_joint, successive_law
from scipy.optimize import brentq
from torch import Tensor

from lightning_spectral.functional.sampling.successive_sampling import (
    draw_successive,
    fit_log_sizes,
    manly_inclusion_probs,
    successive_inclusion_probs,
)


def marginals_by_fine_quadrature(log_sizes: np.ndarray, n: int) -> np.ndarray:
    """Trapezoid in log time, step 0.02, over all times that matter for any term; counts by a dynamic programme."""
    x = np.arange(-log_sizes.max() - 40, -log_sizes.min() + 5, 0.02)
    expected = np.exp(log_sizes[:, None] + x)
    arrived, waiting = -np.expm1(-expected), np.exp(-expected)
    N = len(log_sizes)

    def table(order):
        rows = np.zeros((N + 1, n, len(x)))
        rows[0, 0] = 1
        for k, i in enumerate(order):
            rows[k + 1] = waiting[i] * rows[k]
            rows[k + 1, 1:] += arrived[i] * rows[k, :-1]
        return rows

    prefix, suffix = table(range(N)), table(reversed(range(N)))[::-1]
    at_most = suffix.cumsum(axis=1)
    pi = np.zeros(N)
    for i in range(N):
        in_time = sum(prefix[i, k] * at_most[i + 1, n - 1 - k] for k in range(n))
        pi[i] = 0.02 * (expected[i] * waiting[i] * in_time).sum()
    return pi


@pytest.mark.parametrize(("sizes", "n"), SUCCESSIVE)
def test_marginals_equal_enumeration_of_all_orders(sizes, n):
    expected = successive_joint(sizes, n).diagonal()
    actual = successive_inclusion_probs(torch.tensor(sizes).log(), n).numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-10, rtol=0)
    # Small probabilities need a small relative error, too: multipliers are their inverses.
    np.testing.assert_allclose(actual, expected, rtol=1e-8)


@pytest.mark.parametrize(
    ("log_sizes", "n"),
    [
        (-4 * np.log(np.arange(1, 65)), 7),
        (-2.5 * np.log(np.arange(1, 65)), 13),
        (4 * np.log(np.linspace(2, 1, 40)), 39),
        (-np.arange(30) * 2.0, 12),
        (np.repeat([0.0, -15.0, -30.0], 12), 14),
        (np.linspace(0, 0.1, 100), 50),
    ],
)
def test_marginals_equal_a_much_finer_quadrature(log_sizes, n):
    actual = successive_inclusion_probs(torch.tensor(log_sizes), n)
    np.testing.assert_allclose(actual, marginals_by_fine_quadrature(log_sizes, n), atol=1e-10, rtol=0)
    assert actual.sum().item() == pytest.approx(n, rel=1e-11)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("n", [1, 64, 2048, 4095])
@pytest.mark.parametrize("power", [0.0, 0.5, 4.0])
def test_exact_marginals_of_4096_terms_hold_to_1e_10(n, power):
    """The sum over all terms is n only if every one is right, and flat sizes have n / N."""
    pi = successive_inclusion_probs(-power * torch.arange(1, 4097, dtype=torch.float64).log(), n)
    assert pi.sum().item() == pytest.approx(n, abs=1e-10 * math.sqrt(n))
    assert (pi.diff() <= 1e-11).all()
    if power == 0:
        torch.testing.assert_close(pi, torch.full_like(pi, n / 4096), rtol=0, atol=1e-12)


def test_a_common_factor_of_all_sizes_changes_nothing():
    logs = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(
        successive_inclusion_probs(logs + 500, 6), successive_inclusion_probs(logs, 6), rtol=1e-11, atol=0
    )


def frequency_excess(frequencies: np.ndarray, pi: np.ndarray, size: int) -> float:
    """Largest deviation in units of what chance allows: five standard deviations and one draw."""
    return float((np.abs(frequencies - pi) / (5 * np.sqrt(pi * (1 - pi) / size) + 1 / size)).max())


NUMPY_CASES = [(-2.5 * np.log(np.arange(1, 17)), 4), (-4 * np.log(np.arange(1, 17)), 3), (np.linspace(0, 2, 12), 6)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("log_sizes", "n"), NUMPY_CASES)
def test_numpy_choice_without_replacement_has_these_marginals(log_sizes, n):
    size = 5_000
    p = np.exp(log_sizes) / np.exp(log_sizes).sum()
    rng = np.random.default_rng(0)
    counts = np.zeros(len(p))
    for _ in range(size):
        counts[rng.choice(len(p), n, replace=False, p=p)] += 1
    assert frequency_excess(counts / size, successive_inclusion_probs(torch.tensor(log_sizes), n).numpy(), size) <= 1
    # Negative control: n times the normalised sizes are not the marginals.
    assert frequency_excess(counts / size, np.minimum(n * p, 1), size) > 1


def test_choice_with_inclusion_probabilities_over_n_does_not_have_those_inclusion_probabilities():
    pi, size = np.array([0.95, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05]), 5_000
    rng = np.random.default_rng(1)
    counts = np.zeros(7)
    for _ in range(size):
        counts[rng.choice(7, 3, replace=False, p=pi / 3)] += 1
    assert frequency_excess(counts / size, pi, size) > 1
    draws = draw_successive(fit_log_sizes(torch.tensor(pi)), 3, size, torch.Generator().manual_seed(1))
    assert frequency_excess(np.bincount(draws.flatten(), minlength=7) / size, pi, size) <= 1


def test_the_race_has_the_enumerated_joint_law():
    sizes, n, size = np.array([5.0, 3, 2, 1, 0.5, 0.1]), 3, 40_000
    law = successive_law(sizes, n)
    assert excess(draw_successive(torch.tensor(sizes).log(), n, size, torch.Generator().manual_seed(2)), law) <= 1


def random_probabilities(count: int):
    generator = torch.Generator().manual_seed(3)
    for k in range(count):
        logs = torch.randn(3 + 4 * k, generator=generator, dtype=torch.float64) * (1, 3, 10)[k % 3]
        yield successive_inclusion_probs(logs, int(torch.randint(1, len(logs), (), generator=generator)))


def test_fit_reproduces_the_probabilities():
    for pi in random_probabilities(9):
        fitted = fit_log_sizes(pi)
        torch.testing.assert_close(successive_inclusion_probs(fitted, round(float(pi.sum()))), pi, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "pi",
    [
        [1 - 1e-6, 5e-7, 5e-7],
        [0.999, 0.5, 0.5, 0.001],
        [1 - 1e-9, 0.5, 0.5, 1e-9],
        [1.0, 0.5, 0.5, 0.0],
        [1 - 1e-12, 1e-12],
        [0.0, 1.0],
        [1.0, 1.0],
        [0.25] * 4,
    ],
)
def test_fit_handles_extreme_probabilities(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    fitted = fit_log_sizes(pi)
    torch.testing.assert_close(successive_inclusion_probs(fitted, round(float(pi.sum()))), pi, rtol=0, atol=1e-10)
    assert (fitted[pi == 1] == math.inf).all()
    assert (fitted[pi == 0] == -math.inf).all()


INF = math.inf


@pytest.mark.parametrize(
    ("log_sizes", "n", "expected"),
    [
        ([0.0, -INF, 1.0, -INF], 2, [1, 0, 1, 0]),
        ([0.0, -INF, 1.0, -INF], 3, [1, 1, 1, 0]),
        ([-INF, -INF, -INF], 2, [1, 1, 0]),
        ([INF, 0.0, INF], 2, [1, 0, 1]),
        ([INF, -INF, 0.0], 3, [1, 1, 1]),
        ([INF, 0.0, 0.0, -INF], 2, [1, 0.5, 0.5, 0]),
    ],
)
def test_infinite_sizes_are_always_drawn_and_zero_sizes_only_to_fill_up(log_sizes, n, expected):
    logs = torch.tensor(log_sizes, dtype=torch.float64)
    pi = successive_inclusion_probs(logs, n)
    torch.testing.assert_close(pi, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    draws = draw_successive(logs, n, 50, torch.Generator().manual_seed(0))
    drawn = torch.zeros(50, len(logs)).scatter_(1, draws, 1.0)
    assert (drawn[:, pi == 1] == 1).all()
    assert (drawn[:, pi == 0] == 0).all()
    assert (draws.diff(dim=1) > 0).all()


@pytest.mark.parametrize(
    ("log_sizes", "n", "message"),
    [
        ([0.0, 1.0], 3, r"`num_terms` must be in \[1, N=2\], got 3"),
        ([0.0, math.nan], 1, "with 1 NaN"),
        ([[0.0, 1.0]], 1, r"got \(1, 2\)"),
        ([INF, INF, 0.0], 1, "at most num_terms=1 infinite entries, got 2"),
    ],
)
def test_bad_input_is_named(log_sizes, n, message):
    logs: Tensor = torch.tensor(log_sizes)
    with pytest.raises(ValueError, match=message):
        successive_inclusion_probs(logs, n)
    with pytest.raises(ValueError, match=message):
        draw_successive(logs, n, 1, torch.Generator())
    with pytest.raises(ValueError, match=message):
        manly_inclusion_probs(logs, n)


@pytest.mark.parametrize(("sizes", "n"), [([3.0, 2, 1, 1], 2), (1 / np.arange(1, 40) ** 2.5, 8), (np.ones(9), 4)])
def test_equals_a_general_root_finder(sizes, n):
    w = np.asarray(sizes)
    t = brentq(lambda t: -np.expm1(-w * t).sum() - n, 0, 1e6, xtol=1e-14, rtol=1e-14)
    np.testing.assert_allclose(manly_inclusion_probs(torch.tensor(w).log(), n), -np.expm1(-w * t), rtol=1e-11)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.one_of(st.sampled_from([0.0, -1.0]), st.floats(-140, 0)), min_size=2, max_size=40), st.data())
def test_sums_to_n_and_rises_with_size_in_any_unit(logs, data):
    """Fourth powers over fifteen decades go down to e^-138."""
    n = data.draw(st.integers(1, len(logs) - 1))
    log_sizes = torch.tensor(logs, dtype=torch.float64).sort().values
    probs = manly_inclusion_probs(log_sizes, n)
    assert probs.sum().item() == pytest.approx(n, rel=1e-13)
    assert ((probs > 0) & (probs <= 1)).all()
    assert (probs.diff() >= 0).all()
    # The shifted logarithms are rounded to 3e-14.
    torch.testing.assert_close(manly_inclusion_probs(log_sizes + 300, n), probs, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("logs", "n", "expected"),
    [
        ([0.0, -math.inf, 0.0, math.inf], 2, [0.5, 0, 0.5, 1]),
        ([0.0, -math.inf, 1.0], 3, [1, 1, 1]),
        ([-math.inf, 0.0, -math.inf], 2, [1, 1, 0]),
    ],
)
def test_infinite_sizes_are_certain_and_zero_sizes_fill_up(logs, n, expected):
    np.testing.assert_allclose(manly_inclusion_probs(torch.tensor(logs, dtype=torch.float64), n), expected, rtol=1e-15)


def test_is_off_by_as_much_as_the_docstring_says():
    logs = -4 * torch.arange(1, 65, dtype=torch.float64).log()
    exact, approximate = successive_inclusion_probs(logs, 7), manly_inclusion_probs(logs, 7)
    assert (approximate / exact - 1).abs().max().item() == pytest.approx(0.084, abs=0.002)
    # One draw has the sizes themselves as probabilities; the approximation does not.
    sizes = logs[:8].exp() / logs[:8].exp().sum()
    assert (manly_inclusion_probs(logs[:8], 1) - sizes).abs().max() > 0.07
