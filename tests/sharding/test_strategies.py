"""Strategies: the contract, what their papers say, mixed cohorts, and effective cohorts that nothing beats."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson, Design, SuccessiveSampling
from lightning_spectral.functional.figures import marginal_entropy
from lightning_spectral.functional.sampling.cohorts import (
    client_error,
    effective_cohort_size,
    joint_multipliers,
    kish_size,
)
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, collective_multipliers
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs
from lightning_spectral.sharding import (
    Collective,
    EffectiveCohort,
    PriSM,
    Scaled,
    Schatten,
    ShardingStrategy,
    TopN,
    Unbiased,
)
from lightning_spectral.testing import check_strategy, choices

Plan = tuple[Tensor, Tensor]


def random_spectrum(seed: int, size: int) -> Tensor:
    """A random spectrum, from nearly flat to a decay over many decades."""
    generator = torch.Generator().manual_seed(seed)
    power = 3 * torch.rand((), generator=generator, dtype=torch.float64)
    noise = torch.rand(size, generator=generator, dtype=torch.float64)
    return noise.add(0.5) / torch.arange(1, size + 1, dtype=torch.float64) ** power


def slow_errors(values: Tensor, plan: Plan, cohort_size: float) -> tuple[float, float]:
    """Squared bias plus variance of one client's sub-model and of the average of C, term by term."""
    client = cohort = 0.0
    for s, pi, omega in zip(values.tolist(), plan[0].tolist(), plan[1].tolist(), strict=True):
        bias, variance = 1 - omega * pi, omega**2 * pi * (1 - pi)
        client += s**2 * (bias**2 + variance)
        cohort += s**2 * (bias**2 + variance / cohort_size)
    return client, cohort


def plan_for(values: Tensor, n: int, size: float) -> Plan:
    probs = collective_inclusion_probs(values, n, size)
    return probs, collective_multipliers(probs, size)


STRATEGIES = [
    TopN(),
    PriSM(),
    PriSM(compensation="wallenius"),
    Unbiased(),
    Schatten(),
    Collective(),
    Collective(cohort="best"),
    EffectiveCohort(),
    EffectiveCohort(slack=0.5),
    Scaled(TopN()),
    Scaled(PriSM()),
    Scaled(EffectiveCohort()),
]
SPECTRUM = 1 / torch.arange(1, 65, dtype=torch.float64).sqrt()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_strategy_keeps_the_contract(strategy):
    check_strategy(strategy)


def test_manlys_approximation_fails_the_contract():
    """It exists to reproduce the 2024 paper; on steep spectra its probabilities are off by about 0.01."""
    with pytest.raises(AssertionError, match="but inclusion probability"):
        check_strategy(PriSM(compensation="wallenius", marginals="manly"))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_float32_singular_values_are_computed_in_float64(strategy):
    probs, multipliers = strategy(SPECTRUM.float(), 13, 10)
    assert probs.dtype == multipliers.dtype == torch.float64
    assert probs.sum().item() == pytest.approx(13, rel=1e-11)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
@pytest.mark.parametrize(
    ("values", "n", "message"),
    [([1.0, 2.0], 3, r"`num_terms` must be in \[1, N=2\], got 3"), ([math.nan, 2.0], 1, "got nan at index 0")],
)
def test_bad_input_is_named(strategy, values, n, message):
    with pytest.raises(ValueError, match=message):
        strategy(torch.tensor(values, dtype=torch.float64), n, 10)


def shard_weight(strategy: ShardingStrategy, size: int, cohort_size: int, seed: int) -> Tensor:
    """Singular values of ``size`` averages over cohorts of clients that have not trained, shape (size, N)."""
    probs, multipliers = strategy(SPECTRUM, 13, cohort_size)
    generator = torch.Generator().manual_seed(seed)
    draws = strategy.own_design(SPECTRUM, 13).sample(probs, size * cohort_size, generator)
    held = torch.zeros(size * cohort_size, 64, dtype=torch.float64).scatter_(1, draws, 1.0)
    return (held * multipliers * SPECTRUM).view(size, cohort_size, 64).mean(1)


def test_unbiased_shards_average_to_the_weight():
    shards = shard_weight(Unbiased(), 4000, 1, seed=0)
    probs, _ = Unbiased()(SPECTRUM, 13, 1)
    sigma = SPECTRUM * ((1 - probs) / probs / 4000).sqrt()
    assert ((shards.mean(0) - SPECTRUM).abs() <= 5 * sigma + 1e-12).all()
    # Negative control: PriSM's unscaled shards do not.
    assert ((shard_weight(PriSM(), 4000, 1, seed=0).mean(0) - SPECTRUM).abs() > 5 * sigma + 1e-12).any()


def test_collective_cohorts_have_the_predicted_error_and_the_least_of_all():
    C, size = 10, 400
    probs, _ = Collective()(SPECTRUM, 13, C)
    predicted = float((SPECTRUM**2 * (1 - probs) / (1 + (C - 1) * probs)).sum())
    errors = {}
    for strategy in (Collective(), Unbiased(), PriSM(), TopN()):
        error = (shard_weight(strategy, size, C, seed=1) - SPECTRUM).square().sum(1)
        errors[strategy] = (float(error.mean()), float(error.std()) / size**0.5)
    mean, standard_error = errors.pop(Collective())
    assert abs(mean - predicted) <= 5 * standard_error
    assert all(mean + 5 * standard_error < other - 5 * spread for other, spread in errors.values())


def test_unbiased_multipliers_are_inverse_probabilities_and_one_for_terms_never_drawn():
    probs, multipliers = Unbiased()(torch.tensor([4.0, 1.0, 1.0, 0.0], dtype=torch.float64), 2, 10)
    assert probs.tolist() == [1, 0.5, 0.5, 0]
    assert multipliers.tolist() == [1, 2, 2, 1]


@pytest.mark.parametrize(("N", "n", "exponent"), [(64, 13, 4), (64, 14, 2.5), (15, 3, 4), (15, 4, 2.5), (1, 1, 4)])
def test_prism_exponent_follows_the_keep_ratio_whose_ceiling_n_is(N, n, exponent):
    values = SPECTRUM[:N]
    assert torch.equal(PriSM()(values, n, 1)[0], PriSM(exponent=exponent)(values, n, 1)[0])


def test_prism_reports_the_exact_marginals_of_its_powers():
    probs, multipliers = PriSM(exponent=2)(SPECTRUM, 5, 10)
    torch.testing.assert_close(probs, successive_inclusion_probs((SPECTRUM**2).log(), 5), rtol=1e-12, atol=0)
    assert (multipliers == 1).all()


@pytest.mark.parametrize("exponent", [0, -1.0, math.nan, math.inf])
def test_prism_refuses_other_exponents(exponent):
    with pytest.raises(ValueError, match=f"`exponent` must be positive and finite, or None, got {exponent}"):
        PriSM(exponent=exponent)


def test_only_prism_has_a_design_of_its_own():
    assert isinstance(PriSM().own_design(SPECTRUM, 5), SuccessiveSampling)
    for strategy in (TopN(), Unbiased(), Collective()):
        assert strategy.own_design(SPECTRUM, 5) == ConditionalPoisson()


def test_strategies_rank_from_exploitative_to_explorative_as_in_the_paper():
    """Top-n, Collective, Unbiased, in this order, for the spectrum of a Gaussian weight of 64 x 576."""
    weight = torch.randn(64, 576, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = torch.linalg.svdvals(weight)
    entropies = [marginal_entropy(strategy(values, 13, 10)[0]) for strategy in (TopN(), Collective(), Unbiased())]
    assert entropies[0] == 0
    assert entropies == sorted(entropies)


class Broken(ShardingStrategy):
    """A strategy made from one function that breaks one rule: a negative control of check_strategy."""

    def __init__(self, function: Callable[[Tensor, int, float], tuple[Tensor, Tensor]], design: Design | None = None):
        self.function = function
        self.design = design or ConditionalPoisson()

    def __call__(self, singular_values: Tensor, num_terms: int, cohort_size: float) -> tuple[Tensor, Tensor]:
        return self.function(singular_values, num_terms, cohort_size)

    def own_design(self, singular_values: Tensor, num_terms: int) -> Design:
        return self.design


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda s, n, C: (n * s / s.sum().clamp_min(1e-300), torch.ones_like(s)), "leave"),  # not capped at one
        (lambda s, n, C: (TopN()(s, n, C)[0], 1 / TopN()(s, n, C)[0]), "multipliers are not finite"),
        (lambda s, n, C: Collective()(s + 0.1, n, C), "depends on the unit"),
        (lambda s, n, C: ((torch.arange(len(s)) < n).double(), torch.ones_like(s)), "depends on the order"),
        (lambda s, n, C: tuple(x.float() for x in Collective()(s, n, C)), "not float64"),
        (lambda s, n, C: Collective()(s.mul_(2), n, C), "changed in place"),
        (lambda s, n, C: (TopN()(s, n, C)[0], torch.full_like(s, C)), "not all multipliers are one"),
        (lambda s, n, C: (0.999 * Unbiased()(s, n, C)[0], Unbiased()(s, n, C)[1]), "not n"),
        (lambda s, n, C: (Unbiased()(s, n, C)[0], -Unbiased()(s, n, C)[1]), "not positive"),
    ],
)
def test_a_strategy_that_breaks_a_rule_is_caught(function, message):
    with pytest.raises(AssertionError, match=message):
        check_strategy(Broken(function))


def test_a_strategy_that_writes_in_place_spoils_no_later_check():
    before = {name: values.clone() for name, values in choices.SPECTRA.items()}
    with pytest.raises(AssertionError, match="changed in place"):
        check_strategy(Broken(lambda s, n, C: Collective()(s.mul_(2), n, C)))
    assert all(torch.equal(values, before[name]) for name, values in choices.SPECTRA.items())


def test_a_strategy_whose_design_draws_with_other_probabilities_is_caught():
    sizes_are_not_marginals = Broken(lambda s, n, C: Unbiased()(s, n, C), NaiveChoice())
    with pytest.raises(AssertionError, match=r"its own design .* has frequency"):
        check_strategy(sizes_are_not_marginals)


class NaiveChoice(Design):
    """numpy.random.choice(replace=False, p=inclusion_probs / n)."""

    def fit(self, inclusion_probs: Tensor):
        certain = inclusion_probs == 1
        return SuccessiveSampling(torch.where(certain, math.inf, inclusion_probs.log())).fit(inclusion_probs)


STEEP = 1 / torch.arange(1, 65).double()
NUM_TERMS = [13, 26]
EQUAL = [[5.0] * 6, [5.0] * 4]
UNEQUAL = [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [16.0, 20.0, 25.0, 30.0]]


def error(
    groups: list[tuple[torch.Tensor, torch.Tensor]], s: torch.Tensor = STEEP, weights: list[list[float]] = EQUAL
) -> float:
    """Relative error of the average, term by term and client by client."""
    total, expected = sum(map(sum, weights)), 0.0
    for i in range(len(s)):
        mean = variance = 0.0
        for (pi, omega), own in zip(groups, weights, strict=True):
            p, m = float(pi[i]), float(omega[i])
            mean += sum(weight / total * m * p for weight in own)
            variance += sum((weight / total * m) ** 2 * p * (1 - p) for weight in own)
        expected += float(s[i]) ** 2 * ((1 - mean) ** 2 + variance)
    return expected / float((s**2).sum())


def test_the_papers_recipe_plans_each_group_by_itself() -> None:
    for weights in (EQUAL, UNEQUAL):
        groups = Collective().for_groups(STEEP, NUM_TERMS, weights)
        for (pi, omega), n, size in zip(groups, NUM_TERMS, [6.0, 4.0], strict=True):
            alone = Collective()(STEEP, n, size)
            assert torch.equal(pi, alone[0])
            assert torch.equal(omega, alone[1])


def test_joint_plans_with_the_total_and_the_best_multipliers() -> None:
    groups = Collective(cohort="joint").for_groups(STEEP, NUM_TERMS, EQUAL)
    probs = torch.stack([collective_inclusion_probs(STEEP, n, 10) for n in NUM_TERMS])
    assert torch.equal(torch.stack([pi for pi, _ in groups]), probs)
    expected = joint_multipliers(probs, torch.tensor([6.0, 4.0]))
    torch.testing.assert_close(torch.stack([omega for _, omega in groups]), expected)


def test_joint_counts_unequal_clients_as_kish_does() -> None:
    groups = Collective(cohort="joint").for_groups(STEEP, NUM_TERMS, UNEQUAL)
    sizes = torch.tensor([kish_size(own) for own in UNEQUAL], dtype=torch.float64)
    probs = torch.stack([collective_inclusion_probs(STEEP, n, float(sizes.sum())) for n in NUM_TERMS])
    torch.testing.assert_close(torch.stack([pi for pi, _ in groups]), probs)
    expected = joint_multipliers(probs, sizes, torch.tensor([42.0, 91.0]))
    torch.testing.assert_close(torch.stack([omega for _, omega in groups]), expected)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL, UNEQUAL[::-1]], ids=["equal", "more keep more", "more keep less"])
def test_best_is_no_worse_than_any_recipe(power: float, weights: list[list[float]]) -> None:
    s = STEEP**power
    plans = {c: Collective(cohort=c).for_groups(s, NUM_TERMS, weights) for c in ("group", "joint", "best")}
    errors = {cohort: error(groups, s, weights) for cohort, groups in plans.items()}
    assert errors["best"] <= min(errors.values()) * (1 + 1e-12)
    assert errors["joint"] < errors["group"]


def test_weights_that_are_not_used_make_joint_multipliers_worse_than_the_papers_recipe() -> None:
    """Why `joint` and `best` need the weights: a group that counts little for its size has large multipliers."""
    s = STEEP**0.5
    ignored = Collective(cohort="best").for_groups(s, NUM_TERMS, EQUAL)
    used, paper = (Collective(cohort=c).for_groups(s, NUM_TERMS, UNEQUAL) for c in ("best", "group"))
    assert error(used, s, UNEQUAL) < error(paper, s, UNEQUAL) < 0.5 * error(ignored, s, UNEQUAL)


def test_every_recipe_treats_a_single_group_of_equal_clients_alike() -> None:
    for cohort in ("group", "joint", "best"):
        ((pi, omega),) = Collective(cohort=cohort).for_groups(STEEP, [13], [[7.0] * 10])
        assert torch.equal(pi, Collective()(STEEP, 13, 10)[0])
        torch.testing.assert_close(omega, Collective()(STEEP, 13, 10)[1])


@pytest.mark.parametrize("cohort", ["joint", "best"])
def test_clients_without_examples_do_not_count_unless_all_have_none(cohort: str) -> None:
    plan = Collective(cohort=cohort)  # type: ignore[arg-type]
    nobody, equal = (plan.for_groups(STEEP, NUM_TERMS, w) for w in ([[0.0] * 6, [0.0] * 4], EQUAL))
    for (pi, omega), (expected_pi, expected_omega) in zip(nobody, equal, strict=True):
        assert torch.equal(pi, expected_pi)
        torch.testing.assert_close(omega, expected_omega)
    idle, alone = (plan.for_groups(STEEP, NUM_TERMS[:k], w) for k, w in ((2, [[5.0] * 6, [0.0]]), (1, [[5.0] * 6])))
    torch.testing.assert_close(idle[0], alone[0])
    assert bool(torch.isfinite(idle[1][1]).all())
    assert bool((idle[1][1] > 0).all())


def test_published_figures_of_the_mix_are_reproduced() -> None:
    """Relative discrepancies of six clients at 0.2 and four at 0.4 on 1/i, N = 64: .0150 by groups, .0095 jointly."""
    assert error(Collective().for_groups(STEEP, NUM_TERMS, EQUAL)) == pytest.approx(0.0150, abs=5e-5)
    assert error(Collective(cohort="joint").for_groups(STEEP, NUM_TERMS, EQUAL)) == pytest.approx(0.0095, abs=5e-5)
    assert error(Unbiased().for_groups(STEEP, NUM_TERMS, EQUAL)) == pytest.approx(0.0244, abs=5e-5)


def test_compensated_prism_has_inverse_marginals_exact_or_manlys() -> None:
    log_sizes = 4 * STEEP.log()
    for marginals, function in (("exact", successive_inclusion_probs), ("manly", manly_inclusion_probs)):
        pi, omega = PriSM(4.0, compensation="wallenius", marginals=marginals)(STEEP, 7, 10)
        assert torch.equal(pi, function(log_sizes, 7))
        torch.testing.assert_close(omega, 1 / pi)


def test_multipliers_stay_finite_where_probabilities_underflow() -> None:
    pi, omega = PriSM(4.0, compensation="wallenius")(10.0 ** -torch.linspace(0, 150, 64).double(), 7, 10)
    assert float(pi.min()) < 1e-200
    assert bool(torch.isfinite(omega).all())


def test_scaled_draws_have_the_norm_of_the_whole() -> None:
    strategy, generator = Scaled(PriSM()), torch.Generator().manual_seed(0)
    pi, omega = strategy(STEEP, 13, 10)
    for terms in strategy.own_design(STEEP, 13).fit(pi).draw(5, generator):
        scaled = strategy.drawn_multipliers(STEEP, omega, terms) * STEEP[terms]
        assert float(scaled.norm()) == pytest.approx(float(STEEP.norm()))
    top, _ = Scaled(TopN())(STEEP, 13, 10)
    assert torch.equal(top, TopN()(STEEP, 13, 10)[0])
    zeros = torch.tensor([1.0, 0.0, 0.0]).double()
    assert strategy.drawn_multipliers(zeros, torch.ones(3), torch.tensor([1, 2])).tolist() == [1.0, 1.0]


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
        torch.testing.assert_close(EffectiveCohort(slack)(values, n, C), end(values, n, C), rtol=0, atol=0)


def test_a_single_client_gets_top_n_whatever_the_slack() -> None:
    torch.testing.assert_close(EffectiveCohort(0.5)(GAUSSIAN, 8, 1), TopN()(GAUSSIAN, 8, 1), rtol=0, atol=0)


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


@pytest.mark.sampled(1)
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
    probs, multipliers = EffectiveCohort(0.1)(torch.tensor([3.0, 2.0, 0.0, 0.0], dtype=torch.float64), 2, 10)
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


Floats = NDArray[np.float64]


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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(1)
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
