"""Every strategy keeps the contract, does what its paper says, and broken ones are caught."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson, Design, SuccessiveSampling
from lightning_spectral.functional import marginal_entropy, successive_inclusion_probs
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
from lightning_spectral.testing import check_strategy

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
    [
        ([1.0, 2.0], 0, r"`num_terms` must be in \[1, N=2\], got 0"),
        ([1.0, 2.0], 3, r"`num_terms` must be in \[1, N=2\], got 3"),
        ([1.0, -2.0], 1, "got -2.0 at index 1"),
        ([math.nan, 2.0], 1, "got nan at index 0"),
        ([1.0, math.inf], 1, "got inf at index 1"),
        ([[1.0, 2.0]], 1, r"got shape \(1, 2\)"),
    ],
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
    values = torch.tensor([4.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    probs, multipliers = Unbiased()(values, 2, 10)
    assert probs.tolist() == [1, 0.5, 0.5, 0]
    assert multipliers.tolist() == [1, 2, 2, 1]


def test_collective_multipliers_stay_below_the_cohort_size():
    probs, multipliers = Collective()(SPECTRUM, 13, 10)
    assert (multipliers[probs > 0] < 10).all()
    assert (multipliers >= 1).all()


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


def uncapped(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return n * s / s.sum().clamp_min(1e-300), torch.ones_like(s)


def horvitz_thompson_of_top_n(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    probs, _ = TopN()(s, n, C)
    return probs, 1 / probs


def in_unit_of_the_weight(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return Collective()(s + 0.1, n, C)


def sorted_only(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return (torch.arange(len(s)) < n).double(), torch.ones_like(s)


def single_precision(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return tuple(x.float() for x in Collective()(s, n, C))


def in_place(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return Collective()(s.mul_(2), n, C)


def always_scaled(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    return TopN()(s, n, C)[0], torch.full_like(s, C)


def sum_off(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    probs, multipliers = Unbiased()(s, n, C)
    return 0.999 * probs, multipliers


def negative(s: Tensor, n: int, C: float) -> tuple[Tensor, Tensor]:
    probs, multipliers = Unbiased()(s, n, C)
    return probs, -multipliers


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (uncapped, "leave"),
        (horvitz_thompson_of_top_n, "multipliers are not finite"),
        (in_unit_of_the_weight, "depends on the unit"),
        (sorted_only, "depends on the order"),
        (single_precision, "not float64"),
        (in_place, "changed in place"),
        (always_scaled, "not all multipliers are one"),
        (sum_off, "not n"),
        (negative, "not positive"),
    ],
)
def test_a_strategy_that_breaks_a_rule_is_caught(function, message):
    with pytest.raises(AssertionError, match=message):
        check_strategy(Broken(function))


def test_a_strategy_whose_design_draws_with_other_probabilities_is_caught():
    sizes_are_not_marginals = Broken(lambda s, n, C: Unbiased()(s, n, C), NaiveChoice())
    with pytest.raises(AssertionError, match=r"its own design .* has frequency"):
        check_strategy(sizes_are_not_marginals)


class NaiveChoice(Design):
    """numpy.random.choice(replace=False, p=inclusion_probs / n)."""

    def fit(self, inclusion_probs: Tensor):
        certain = inclusion_probs == 1
        return SuccessiveSampling(torch.where(certain, math.inf, inclusion_probs.log())).fit(inclusion_probs)
