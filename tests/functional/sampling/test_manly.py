"""Manly's approximation, and how far it is from the exact marginals of successive sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from lightning_spectral.functional import manly_inclusion_probs, successive_inclusion_probs


@pytest.mark.parametrize(("sizes", "n"), [([3.0, 2, 1, 1], 2), (1 / np.arange(1, 40) ** 2.5, 8), (np.ones(9), 4)])
def test_equals_a_general_root_finder(sizes, n):
    w = np.asarray(sizes)
    t = brentq(lambda t: -np.expm1(-w * t).sum() - n, 0, 1e6, xtol=1e-14, rtol=1e-14)
    np.testing.assert_allclose(manly_inclusion_probs(torch.tensor(w).log(), n), -np.expm1(-w * t), rtol=1e-11)


@settings(deadline=None, max_examples=200)
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
    probs = manly_inclusion_probs(torch.tensor(logs, dtype=torch.float64), n)
    np.testing.assert_allclose(probs, expected, rtol=1e-15)


def test_is_off_by_as_much_as_the_docstring_says():
    logs = -4 * torch.arange(1, 65, dtype=torch.float64).log()
    exact, approximate = successive_inclusion_probs(logs, 7), manly_inclusion_probs(logs, 7)
    assert (approximate / exact - 1).abs().max().item() == pytest.approx(0.084, abs=0.002)
    # One draw has the sizes themselves as probabilities; the approximation does not.
    sizes = logs[:8].exp() / logs[:8].exp().sum()
    assert (manly_inclusion_probs(logs[:8], 1) - sizes).abs().max() > 0.07
