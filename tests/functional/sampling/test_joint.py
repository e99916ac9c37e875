"""Joint inclusion probabilities against enumeration of all samples, and their identities."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import conditional_poisson_law, spectra, successive_joint

from lightning_spectral.functional import (
    conditional_poisson_joint_probs,
    fit_conditional_poisson,
    proportional_inclusion_probs,
    successive_inclusion_probs,
    successive_joint_probs,
)
from lightning_spectral.functional.sampling.open_terms import leave_two_out_probabilities


def conditional_poisson_by_enumeration(p: np.ndarray, n: int) -> np.ndarray:
    rows, law = conditional_poisson_law(p, n)
    return rows.T @ (law[:, None] * rows)


@pytest.mark.parametrize(("N", "n"), [(2, 1), (3, 2), (5, 1), (6, 5), (8, 3), (12, 6)])
@pytest.mark.parametrize("kind", ["uneven", "half", "extreme"])
def test_conditional_poisson_pairs_equal_enumeration(N, n, kind):
    rng = np.random.default_rng(N)
    odds = {"uneven": rng.random(N) + 0.1, "half": np.ones(N), "extreme": 10.0 ** rng.uniform(-8, 8, N)}[kind]
    p = odds / (1 + odds)
    joint = conditional_poisson_joint_probs(torch.tensor(p), n)
    np.testing.assert_allclose(joint, conditional_poisson_by_enumeration(p, n), atol=1e-14, rtol=0)


def test_certain_and_impossible_terms_come_with_everything_and_with_nothing():
    p = np.array([1, 0.3, 0, 0.6, 0.6, 1])
    joint = conditional_poisson_joint_probs(torch.tensor(p), 4)
    np.testing.assert_allclose(joint, conditional_poisson_by_enumeration(p, 4), atol=1e-15, rtol=0)
    logs = torch.tensor([torch.inf, 0.0, -torch.inf, 1.0, 0.5, torch.inf], dtype=torch.float64)
    joint = successive_joint_probs(logs, 4)
    np.testing.assert_allclose(joint[0], successive_inclusion_probs(logs, 4), atol=1e-12)
    np.testing.assert_allclose(joint[[1, 3, 4]][:, [1, 3, 4]], successive_joint(np.exp([0, 1, 0.5]), 2), atol=1e-12)
    assert (joint[2] == 0).all()


@pytest.mark.parametrize("pi", [[1.0, 1.0, 0.0], [1.0]])
def test_joint_probabilities_without_choice_are_products(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    joint = conditional_poisson_joint_probs(pi, round(float(pi.sum())))
    assert torch.equal(joint, torch.outer(pi, pi))


SUCCESSIVE = [
    (np.array([5.0, 1, 1, 1, 1, 1]), 3),
    (10.0 ** -np.arange(6), 3),
    (np.array([1.0, 2, 3, 1e-5]), 1),
    (1 / np.arange(1, 7) ** 2.0, 5),
    (np.ones(9), 4),
    (np.arange(1, 9) ** 4.0, 4),
]


@pytest.mark.parametrize(("sizes", "n"), SUCCESSIVE)
def test_successive_pairs_equal_enumeration_of_all_orders(sizes, n):
    joint = successive_joint_probs(torch.tensor(sizes).log(), n)
    np.testing.assert_allclose(joint, successive_joint(sizes, n), atol=1e-11, rtol=0)


def test_leaving_two_out_equals_the_law_of_the_remaining_terms():
    p = np.random.default_rng(0).random(9)
    actual = leave_two_out_probabilities(torch.tensor(p), 2, 4)
    for i, j in itertools.combinations(range(9), 2):
        law = np.ones(1)
        for x in np.delete(p, [i, j]):
            law = np.convolve(law, [1 - x, x])
        assert float(actual[i, j]) == pytest.approx(law[2:5].sum(), abs=1e-14)


@settings(deadline=None, max_examples=60)
@given(spectra, st.data())
def test_identities_hold_for_any_spectrum(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    pi = proportional_inclusion_probs(torch.tensor(values, dtype=torch.float64), n)
    joint = conditional_poisson_joint_probs(fit_conditional_poisson(pi), n)
    torch.testing.assert_close(joint, joint.T, rtol=0, atol=1e-15)
    torch.testing.assert_close(joint.diagonal(), pi, rtol=0, atol=1e-12)
    torch.testing.assert_close(joint.sum(1), n * pi, rtol=0, atol=1e-11)
    assert (joint >= 0).all()
    # Terms are negatively dependent, as in every conditional Poisson design: pairs are rarer than for independent
    # terms.
    excess = joint - torch.outer(pi, pi)
    assert (excess.fill_diagonal_(0.0) <= 1e-12).all()


@pytest.mark.parametrize(("N", "n"), [(512, 205), (1100, 550)])
def test_identities_hold_for_large_layers(N, n):
    pi = proportional_inclusion_probs(1 / torch.arange(1, N + 1, dtype=torch.float64).sqrt(), n)
    joint = conditional_poisson_joint_probs(fit_conditional_poisson(pi), n)
    torch.testing.assert_close(joint.diagonal(), pi, rtol=0, atol=1e-12)
    torch.testing.assert_close(joint.sum(1), n * pi, rtol=0, atol=N * 1e-13)


def test_successive_identities_hold_for_a_large_layer():
    logs = -4 * torch.arange(1, 257, dtype=torch.float64).log()
    joint = successive_joint_probs(logs, 52)
    torch.testing.assert_close(joint.sum(1), 52 * joint.diagonal(), rtol=0, atol=1e-10)
    assert torch.equal(joint, joint.T)
