"""Conditional Poisson sampling, and joint probabilities, against enumeration of all subsets and a dynamic programme."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import SUCCESSIVE, conditional_poisson_law, excess, spectra, successive_joint
from scipy.optimize import minimize
from torch import Tensor

from lightning_spectral.functional.sampling.conditional_poisson import (
    conditional_poisson_joint_probs,
    draw_conditional_poisson,
    fit_conditional_poisson,
    fit_conditional_poissons,
    poisson_conditional_inclusion_probs,
    working_open_terms,
)
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, proportional_inclusion_probs
from lightning_spectral.functional.sampling.open_terms import (
    centred_logits,
    count_probabilities,
    leave_one_out_probabilities,
)
from lightning_spectral.functional.sampling.successive_sampling import (
    successive_inclusion_probs,
    successive_joint_probs,
)


def marginals_by_dynamic_programme(p: np.ndarray, n: int) -> np.ndarray:
    """Prefix and suffix tables of the count; sums of positive products only, so that no digit is lost."""
    N, q = len(p), 1 - p
    prefix, suffix = np.zeros((N + 1, n + 1)), np.zeros((N + 1, n + 1))
    prefix[0, 0] = suffix[N, 0] = 1
    for i in range(N):
        prefix[i + 1] = q[i] * prefix[i]
        prefix[i + 1, 1:] += p[i] * prefix[i, :-1]
    for i in reversed(range(N)):
        suffix[i] = q[i] * suffix[i + 1]
        suffix[i, 1:] += p[i] * suffix[i + 1, :-1]
    drawn = np.array([(prefix[i, :n] * suffix[i + 1, n - 1 :: -1][:n]).sum() for i in range(N)])
    return p * drawn / prefix[N, n]


def with_integer_sum(pi: Tensor) -> Tensor:
    """Adjust probabilities slightly, so that they sum to an integer."""
    n = min(max(round(float(pi.sum())), 1), len(pi) - 1)
    return torch.sigmoid(centred_logits(torch.logit(pi), n))


def random_designs(count: int, seed: int):
    rng = np.random.default_rng(seed)
    for k in range(count):
        N = int(rng.integers(2, 60))
        extreme = 10.0 ** rng.uniform(-12, 0, N) * 0.999
        yield with_integer_sum(
            torch.tensor(
                [
                    rng.uniform(0.01, 0.99, N),
                    np.where(rng.random(N) < 0.5, extreme, 1 - extreme),
                    rng.choice([1e-12, 1e-6, 0.5, 1 - 1e-6, 1 - 1e-12], N),
                    rng.choice([1e-12, 1 - 1e-12, 3e-12], N),
                    rng.choice([1e-9, 0.3, 1 - 1e-9], N),
                ][k % 5]
            )
        )


@pytest.mark.parametrize(("N", "n"), [(2, 1), (5, 1), (5, 4), (8, 3), (10, 5)])
def test_forward_map_equals_enumeration_of_all_subsets(N, n):
    p = torch.rand(N, generator=torch.Generator().manual_seed(N), dtype=torch.float64)
    rows, probability = conditional_poisson_law(p.numpy(), n)
    np.testing.assert_allclose(poisson_conditional_inclusion_probs(p, n), probability @ rows, atol=1e-14)


@pytest.mark.slow
def test_fit_reaches_1e_12_on_adversarial_designs():
    worst = 0.0
    for pi in random_designs(250, seed=0):
        implied = marginals_by_dynamic_programme(fit_conditional_poisson(pi).numpy(), round(float(pi.sum())))
        worst = max(worst, float(np.abs(implied - pi.numpy()).max()))
    assert worst < 1e-12


def rows_of_one_size(N: int, n: int, seed: int):
    rng = np.random.default_rng(seed)
    for low in (-0.1, -3, -9, -12):
        for _ in range(4):
            pi = 10.0 ** rng.uniform(low, 0, N) * 0.999
            pi = np.where(rng.random(N) < 0.5, pi, 1 - pi)
            yield torch.sigmoid(centred_logits(torch.logit(torch.tensor(pi)), n))
    for ones in range(n + 1):  # the rest is zero, one half each, or has one open place
        pi = torch.zeros(N, dtype=torch.float64)
        pi[:ones] = 1
        pi[ones : ones + 2 * (n - ones)] = 0.5
        yield pi[torch.randperm(N, generator=torch.Generator().manual_seed(ones))]


@pytest.mark.parametrize("most", [2**15, 30], ids=["together", "in parts"])
def test_vectors_fitted_together_are_fitted_as_well_as_each_alone(monkeypatch, most):
    monkeypatch.setattr("lightning_spectral.functional.sampling.conditional_poisson.MOST_OPEN", most)
    rows = [pi for pair in zip(rows_of_one_size(12, 5, 0), rows_of_one_size(9, 4, 1), strict=False) for pi in pair]
    for pi, together in zip(rows, fit_conditional_poissons(rows), strict=True):
        implied = marginals_by_dynamic_programme(together.numpy(), round(float(pi.sum())))
        np.testing.assert_allclose(implied, pi, atol=1e-12, rtol=0)
        likely = (pi > 1e-3) & (pi < 1 - 1e-3)
        torch.testing.assert_close(together[likely], fit_conditional_poisson(pi)[likely], rtol=1e-9, atol=0)


@pytest.mark.parametrize(("N", "n"), [(64, 13), (512, 52), (512, 205), (1100, 550)])
@pytest.mark.parametrize("power", [0.1, 1.0, 3.0])
def test_fit_reaches_1e_12_on_spectra(N, n, power):
    lam = torch.arange(1, N + 1, dtype=torch.float64) ** -power
    for pi in (proportional_inclusion_probs(lam, n), collective_inclusion_probs(lam, n, 10)):
        p = fit_conditional_poisson(pi).numpy()
        np.testing.assert_allclose(marginals_by_dynamic_programme(p, n), pi, atol=1e-12, rtol=0)


def test_fit_and_draw_handle_4096_terms():
    n = 2048
    pi = proportional_inclusion_probs(torch.linspace(3, 1, 4096, dtype=torch.float64), n)
    p = fit_conditional_poisson(pi)
    np.testing.assert_allclose(marginals_by_dynamic_programme(p.numpy(), n), pi, atol=1e-12, rtol=0)
    draws = draw_conditional_poisson(working_open_terms(p, n), 5, torch.Generator().manual_seed(0))
    assert draws.shape == (5, n)
    assert (draws.diff(dim=1) > 0).all()


@pytest.mark.parametrize("pi", [[1.0, 0.5, 0.5], [1.0, 1.0, 0.0], [1.0], [0.0, 1.0], [1 - 1e-14, 1e-14], [1 / 3] * 3])
def test_designs_with_little_or_no_choice(pi):
    pi = torch.tensor(pi, dtype=torch.float64)
    n = round(float(pi.sum()))
    p = fit_conditional_poisson(pi)
    torch.testing.assert_close(poisson_conditional_inclusion_probs(p, n), pi, rtol=0, atol=1e-12)
    assert draw_conditional_poisson(working_open_terms(p, n), 3, torch.Generator()).shape == (3, n)


def test_float32_probabilities_sum_closely_enough_to_an_integer():
    pi = proportional_inclusion_probs(torch.rand(2000, generator=torch.Generator().manual_seed(1)), 777)
    p = fit_conditional_poisson(pi)
    assert p.dtype == torch.float64
    # float32 sums of 2000 terms are off by at most 1e-6 n = 8e-4, which the fit spreads over the terms.
    torch.testing.assert_close(poisson_conditional_inclusion_probs(p, 777), pi.double(), rtol=0, atol=1e-6)


def test_no_other_design_has_the_same_marginals_and_more_entropy():
    """With all subset probabilities as unknowns, maximise the entropy over all designs with these marginals."""
    pi = torch.tensor([0.9, 0.6, 0.3, 0.2], dtype=torch.float64)
    rows, ours = conditional_poisson_law(fit_conditional_poisson(pi).numpy(), 2)
    result = minimize(
        lambda law: float((law * np.log(law)).sum()),
        np.full(len(rows), 1 / len(rows)),
        jac=lambda law: np.log(law) + 1,
        method="SLSQP",
        bounds=[(1e-9, 1)] * len(rows),
        constraints={"type": "eq", "fun": lambda law: law @ rows - pi.numpy(), "jac": lambda _: rows.T},
        options={"ftol": 1e-15, "maxiter": 500},
    )
    assert result.success
    np.testing.assert_allclose(result.x, ours, atol=1e-5)
    assert (ours * np.log(ours)).sum() <= result.fun + 1e-9


def test_draws_have_the_enumerated_joint_law():
    pi = torch.tensor([0.9, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05, 0.05], dtype=torch.float64)
    n, size = 3, 40_000
    p = fit_conditional_poisson(pi)
    rows, probs = conditional_poisson_law(p.numpy(), n)
    law = {tuple(row.nonzero()[0].tolist()): float(p) for row, p in zip(rows, probs, strict=True)}
    designs = (working_open_terms(w, n) for w in (p, pi))
    right, wrong = (draw_conditional_poisson(parts, size, torch.Generator().manual_seed(3)) for parts in designs)
    assert excess(right, law) <= 1
    assert excess(wrong, law) > 1  # negative control: inclusion probabilities are not working probabilities


def test_equal_working_odds_up_to_a_factor_draw_the_same_law():
    p = torch.tensor([0.9, 0.5, 0.3, 0.3], dtype=torch.float64)
    scaled = torch.sigmoid(torch.logit(p) - 20)
    torch.testing.assert_close(
        poisson_conditional_inclusion_probs(scaled, 2), poisson_conditional_inclusion_probs(p, 2), rtol=1e-8, atol=0
    )
    # Uncentred rows would have two ones once in 1e17 tries; the draw centres them first.
    assert draw_conditional_poisson(working_open_terms(scaled, 2), 100, torch.Generator()).shape == (100, 2)


@pytest.mark.parametrize("kind", ["even", "steep", "tiny", "half"])
@pytest.mark.parametrize("N", [1, 2, 9, 40, 300])
def test_leave_one_out_probabilities_equal_the_dynamic_programme(N, kind):
    rng = np.random.default_rng(N)
    p = {
        "even": rng.random(N),
        "steep": 10.0 ** rng.uniform(-12, 0, N),
        "tiny": 1e-8 * rng.random(N),
        "half": np.full(N, 0.5),
    }[kind]

    def law(trials: np.ndarray) -> np.ndarray:
        pmf = np.ones(1)
        for x in trials:
            pmf = np.convolve(pmf, [1 - x, x])
        return pmf

    mean = int(p.sum())
    total = law(p)
    for first, last in [(mean, mean), (0, mean), (mean + 1, N), (0, N), (N + 1, N + 3)]:
        expected = total[first : last + 1].sum()
        assert float(count_probabilities(torch.tensor(p), first, last)) == pytest.approx(expected, abs=1e-13)
        without = [law(np.delete(p, i))[first : last + 1].sum() for i in range(0, N, max(1, N // 5))]
        actual = leave_one_out_probabilities(torch.tensor(p), (first, last))[0][:: max(1, N // 5)]
        np.testing.assert_allclose(actual, without, atol=1e-13, rtol=0)


def test_bad_input_is_named():
    half = torch.full((4,), 0.5)
    for pi, message in [
        (torch.full((3,), 0.5), "got the sum 1.5"),
        (torch.zeros(3), "at least 1, got the sum 0"),
        (torch.tensor([1.5, 0.5]), r"must be in \[0, 1\], got 1.5 at index 0"),
        (torch.tensor([-0.5, 1.5]), "non-negative, got -0.5 at index 0"),
        (torch.tensor([math.nan, 1.0]), "got nan at index 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            fit_conditional_poisson(pi)
    with pytest.raises(ValueError, match=r"`num_terms` must be in \[1, N=4\], got 5"):
        poisson_conditional_inclusion_probs(half, 5)
    with pytest.raises(ValueError, match=r"number of ones \(0\) and of positive entries \(1\).*got 2"):
        working_open_terms(torch.tensor([0.5, 0.0, 0.0]), 2)


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


@pytest.mark.parametrize(("sizes", "n"), SUCCESSIVE)
def test_successive_pairs_equal_enumeration_of_all_orders(sizes, n):
    joint = successive_joint_probs(torch.tensor(sizes).log(), n)
    np.testing.assert_allclose(joint, successive_joint(sizes, n), atol=1e-11, rtol=0)


@settings(deadline=None, max_examples=30)
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
    assert ((joint - torch.outer(pi, pi)).fill_diagonal_(0.0) <= 1e-12).all()


@pytest.mark.parametrize(("N", "n"), [(512, 205), (1100, 550)])
def test_identities_hold_for_large_layers(N, n):
    pi = proportional_inclusion_probs(1 / torch.arange(1, N + 1, dtype=torch.float64).sqrt(), n)
    joint = conditional_poisson_joint_probs(fit_conditional_poisson(pi), n)
    torch.testing.assert_close(joint.diagonal(), pi, rtol=0, atol=1e-12)
    torch.testing.assert_close(joint.sum(1), n * pi, rtol=0, atol=N * 1e-13)


def test_successive_identities_hold_for_a_large_layer():
    joint = successive_joint_probs(-4 * torch.arange(1, 257, dtype=torch.float64).log(), 52)
    torch.testing.assert_close(joint.sum(1), 52 * joint.diagonal(), rtol=0, atol=1e-10)
    assert torch.equal(joint, joint.T)
