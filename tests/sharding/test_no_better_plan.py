"""A general solver finds no plan that is better than EffectiveCohort's in both errors."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cohort_errors import plan_for, random_spectrum, slow_errors
from numpy.typing import NDArray
from scipy.optimize import minimize

from lightning_spectral.functional.sampling.cohorts import client_error, effective_cohort_size
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs
from lightning_spectral.sharding import EffectiveCohort, TopN, Unbiased

Floats = NDArray[np.float64]
EPS = torch.finfo(torch.float64).eps
ACCURACY = 1e-6  # of the effective number of clients, from below


def feasible(probs: Floats, n: int) -> Floats:
    """A solver's result, adjusted to meet its constraints exactly: no more than n terms, each at most once."""
    probs = probs.clip(0.0, 1.0)
    result: Floats = probs * min(1.0, n / probs.sum())
    return result


def solve(
    objective: Callable[[Floats], float], starts: list[Floats], n: int, size: int, **constraint: object
) -> list[Floats]:
    """SLSQP from several starts; the first ``size`` variables are probabilities."""
    constraints = [{"type": "eq", "fun": lambda x: x[:size].sum() - n}, *([constraint] if constraint else [])]
    options = {"maxiter": 2000, "ftol": 1e-14}
    found = []
    for start in starts:
        bounds = [(0.0, 1.0)] * size + [(0.0, None)] * (len(start) - size)
        found.append(
            minimize(objective, start, bounds=bounds, constraints=constraints, method="SLSQP", options=options).x
        )
    return found


def starting_points(n: int, size: int) -> list[Floats]:
    rng = np.random.default_rng(0)
    points = [np.full(size, n / size)]
    for _ in range(4):
        weights = rng.uniform(0.1, 1.0, size)
        points.append(np.clip(n * weights / weights.sum(), 0.01, 0.99))
    return points


@pytest.mark.parametrize("lam", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_has_a_smaller_mixture_of_both_errors(seed: int, lam: float) -> None:
    """The best multipliers follow from the derivative: omega = 1 / (pi + (1 - pi) kappa), with kappa = v's weight."""
    values, n, C = random_spectrum(seed, 8), 3, 10.0
    kappa = lam + (1 - lam) / C

    def mixture(probs: Floats) -> float:
        omega = 1 / (probs + (1 - probs) * kappa)
        parts = (1 - omega * probs) ** 2 + omega**2 * probs * (1 - probs) * kappa
        return float((values.numpy() ** 2 * parts).sum())

    ours = mixture(collective_inclusion_probs(values, n, 1 / kappa).numpy())
    client, cohort = slow_errors(values, plan_for(values, n, 1 / kappa), C)
    assert lam * client + (1 - lam) * cohort == pytest.approx(ours, rel=100 * EPS)
    theirs = [mixture(feasible(x, n)) for x in solve(mixture, starting_points(n, 8), n, 8)]
    assert ours <= min(theirs) * (1 + 100 * EPS)  # theirs are feasible: only rounding can make them better
    assert min(theirs) <= ours * (1 + 1e-6)  # and the solver did search
    assert ours < mixture(Unbiased()(values, n, C)[0].numpy())  # negative control


@pytest.mark.parametrize("slack", [0.05, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_no_plan_with_such_clients_has_a_better_average(seed: int, slack: float) -> None:
    """Over probabilities and multipliers at once.

    A solver keeps its constraint up to its own accuracy. So its plan is compared with ours for the client's error that
    it actually has, and ours is taken at the upper end of the accuracy of the effective number of clients.
    """
    values, n, C, N = random_spectrum(seed, 7), 2, 10.0, 7
    squares = values.numpy() ** 2
    best = float(client_error(values, TopN()(values, n, C)[0], 1.0))

    def error(x: Floats, share: float) -> float:
        probs, omega = x[:N], x[N:]
        return float((squares * ((1 - omega * probs) ** 2 + omega**2 * probs * (1 - probs) * share)).sum())

    def room(x: Floats) -> float:
        return (1 + slack) * best - error(x, 1.0)

    starts = [np.concatenate([probs, 1 / (probs + (1 - probs) / 2)]) for probs in starting_points(n, N)]
    found = solve(lambda x: error(x, 1 / C), starts, n, N, type="ineq", fun=room)
    theirs = []
    for x in found:
        plan = np.concatenate([feasible(x[:N], n), x[N:]])
        size = effective_cohort_size(values, n, C, max(0.0, error(plan, 1.0) / best - 1))
        ours = slow_errors(values, plan_for(values, n, min(C, size * (1 + 2 * ACCURACY))), C)[1]
        assert ours <= error(plan, 1 / C) * (1 + 100 * EPS)
        if room(plan) >= -1e-9 * best:
            theirs.append(error(plan, 1 / C))
    strategy = slow_errors(values, EffectiveCohort(slack)(values, n, C), C)[1]
    assert min(theirs) <= strategy * (1 + 1e-4)  # the solver did search, and found a plan nearly as good
    assert strategy < slow_errors(values, TopN()(values, n, C), C)[1]  # negative control
