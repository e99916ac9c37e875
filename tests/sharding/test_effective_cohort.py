"""Between TopN and Collective: the bound on a client's error is kept and used up, and the ends are exact."""

import math
from itertools import pairwise

import pytest
import torch
from cohort_errors import plan_for, random_spectrum, slow_errors
from torch import Tensor

from lightning_spectral.functional.sampling.cohorts import client_error, effective_cohort_size
from lightning_spectral.sharding import Collective, EffectiveCohort, Scaled, TopN

EPS = torch.finfo(torch.float64).eps
ACCURACY = 1e-6  # of the effective number of clients, from below
GAUSSIAN = torch.linalg.svdvals(torch.randn(40, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
SPECTRA = {
    "slow decay": 1 / torch.arange(1, 41, dtype=torch.float64),
    "Gaussian": GAUSSIAN,
    "flat": torch.ones(40, dtype=torch.float64),
    "gap after n": torch.cat([GAUSSIAN[:8], 0.1 * GAUSSIAN[8:]]),
    "ties": torch.tensor([5.0] * 5 + [2.0] * 10 + [1.0] * 25, dtype=torch.float64),
}


@pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA)
@pytest.mark.parametrize("n", [1, 8, 40])
@pytest.mark.parametrize("C", [1, 4.5, 100])
def test_the_ends_are_top_n_and_collective(values: Tensor, n: int, C: float) -> None:
    for slack, end in ((0.0, TopN()), (math.inf, Collective())):
        for found, expected in zip(EffectiveCohort(slack)(values, n, C), end(values, n, C), strict=True):
            assert torch.equal(found, expected)


def test_a_single_client_gets_top_n_whatever_the_slack() -> None:
    for found, expected in zip(EffectiveCohort(0.5)(GAUSSIAN, 8, 1), TopN()(GAUSSIAN, 8, 1), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA)
@pytest.mark.parametrize("size", [1.0, 1.5, 4.0, 50.0])
def test_a_clients_error_is_that_of_the_slow_sum(values: Tensor, size: float) -> None:
    plan = plan_for(values, 8, size)
    slow, _ = slow_errors(values, plan, size)
    # bias and variance are differences of numbers up to C: each term is off by 4 C roundings of the whole norm
    room = (4 * size + len(values)) * EPS * float((values**2).sum())
    assert abs(float(client_error(values, plan[0], size)) - slow) <= room


@pytest.mark.parametrize("slack", [0.02, 0.5])
def test_clients_that_are_drawn_have_the_predicted_error(slack: float) -> None:
    strategy, values, draws = EffectiveCohort(slack), SPECTRA["slow decay"], 20_000
    probs, multipliers = strategy(values, 8, 20)
    terms = strategy.own_design(values, 8).sample(probs, draws, torch.Generator().manual_seed(0))
    held = torch.zeros(draws, len(values), dtype=torch.float64).scatter_(1, terms, 1.0)
    errors = (values * (1 - held * multipliers)).square().sum(1)
    standard_error = float(errors.std()) / draws**0.5
    size = effective_cohort_size(values, 8, 20, slack)
    assert abs(float(errors.mean()) - float(client_error(values, probs, size))) <= 5 * standard_error
    best, _ = slow_errors(values, TopN()(values, 8, 20), 20)
    assert abs(float(errors.mean()) - best) > 5 * standard_error  # negative control


@pytest.mark.parametrize(("slack", "C"), [(1e-3, 2), (1e-3, 1000), (0.05, 10), (0.5, 10), (0.5, 1000)])
def test_the_bound_is_kept_and_used_up(slack: float, C: float) -> None:
    spectra = [*SPECTRA.values(), *(random_spectrum(seed, 30) for seed in range(20))]
    used_up = 0
    for values in spectra:
        bound = (1 + slack) * slow_errors(values, TopN()(values, 8, C), C)[0]
        size = effective_cohort_size(values, 8, C, slack)
        client, _ = slow_errors(values, EffectiveCohort(slack)(values, 8, C), C)
        # the room of the slow sum, as above
        assert client <= bound + (4 * size + len(values)) * EPS * float((values**2).sum())
        assert 1 <= size <= C
        if size < C:
            used_up += 1
            assert slow_errors(values, plan_for(values, 8, 1.001 * size), C)[0] > bound
    assert used_up > 5  # otherwise it was Collective's plan nearly everywhere


@pytest.mark.parametrize("seed", range(12))
def test_along_the_way_clients_get_worse_and_the_cohort_better(seed: int) -> None:
    values, C = random_spectrum(seed, 30), 50.0
    sizes = torch.linspace(0, math.log(C), 60, dtype=torch.float64).exp().tolist()
    clients, cohorts = zip(*(slow_errors(values, plan_for(values, 6, size), C) for size in sizes), strict=True)
    room = (4 * C + len(values)) * EPS * float((values**2).sum())
    assert all(later >= earlier - room for earlier, later in pairwise(clients))
    assert all(later <= earlier + room for earlier, later in pairwise(cohorts))
    assert clients[-1] > clients[0] + room
    assert cohorts[-1] < cohorts[0] - room


def test_terms_that_fit_in_are_all_held() -> None:
    values = torch.tensor([3.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    probs, multipliers = EffectiveCohort(0.1)(values, 2, 10)
    assert probs.tolist() == [1, 1, 0, 0]
    assert multipliers[:2].tolist() == [1, 1]


def test_the_effective_number_is_among_the_figures() -> None:
    (figure,) = EffectiveCohort(0.05).figures(GAUSSIAN, 8, 10).items()
    assert figure == ("effective_cohort", effective_cohort_size(GAUSSIAN, 8, 10, 0.05))
    assert 1 < figure[1] < 10
    assert EffectiveCohort(0.05).figures(1000 * GAUSSIAN, 8, 10)["effective_cohort"] == pytest.approx(
        figure[1], rel=ACCURACY
    )
    assert Scaled(EffectiveCohort(0.05)).figures(GAUSSIAN, 8, 10) == dict([figure])
    assert TopN().figures(GAUSSIAN, 8, 10) == {}


@pytest.mark.parametrize("slack", [-0.1, math.nan, -math.inf, "0.05"])
def test_a_negative_slack_is_refused(slack: float) -> None:
    with pytest.raises((TypeError, ValueError), match=f"`slack` must be (at least 0|a number), got {slack!r}"):
        EffectiveCohort(slack)
    with pytest.raises((TypeError, ValueError), match=f"`slack` must be (at least 0|a number), got {slack!r}"):
        effective_cohort_size(GAUSSIAN, 8, 10, slack)
