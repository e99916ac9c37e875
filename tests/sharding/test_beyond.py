"""Strategies of mixed cohorts, and multipliers that are known only after the draw."""

import pytest
import torch

from lightning_spectral.functional import (
    collective_inclusion_probs,
    joint_multipliers,
    manly_inclusion_probs,
    successive_inclusion_probs,
)
from lightning_spectral.functional.sampling.cohorts import kish_size
from lightning_spectral.sharding import Collective, PriSM, Scaled, TopN, Unbiased

SPECTRUM = 1 / torch.arange(1, 65).double()
NUM_TERMS = [13, 26]
EQUAL = [[5.0] * 6, [5.0] * 4]
UNEQUAL = [[2.0, 4.0, 6.0, 8.0, 10.0, 12.0], [16.0, 20.0, 25.0, 30.0]]


def error(
    groups: list[tuple[torch.Tensor, torch.Tensor]],
    s: torch.Tensor = SPECTRUM,
    weights: list[list[float]] = EQUAL,
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
        groups = Collective().for_groups(SPECTRUM, NUM_TERMS, weights)
        for (pi, omega), n, size in zip(groups, NUM_TERMS, [6.0, 4.0], strict=True):
            alone = Collective()(SPECTRUM, n, size)
            assert torch.equal(pi, alone[0])
            assert torch.equal(omega, alone[1])


def test_joint_plans_with_the_total_and_the_best_multipliers() -> None:
    groups = Collective(cohort="joint").for_groups(SPECTRUM, NUM_TERMS, EQUAL)
    probs = torch.stack([collective_inclusion_probs(SPECTRUM, n, 10) for n in NUM_TERMS])
    assert torch.equal(torch.stack([pi for pi, _ in groups]), probs)
    expected = joint_multipliers(probs, torch.tensor([6.0, 4.0]))
    torch.testing.assert_close(torch.stack([omega for _, omega in groups]), expected)


def test_joint_counts_unequal_clients_as_kish_does() -> None:
    groups = Collective(cohort="joint").for_groups(SPECTRUM, NUM_TERMS, UNEQUAL)
    sizes = torch.tensor([kish_size(own) for own in UNEQUAL], dtype=torch.float64)
    probs = torch.stack([collective_inclusion_probs(SPECTRUM, n, float(sizes.sum())) for n in NUM_TERMS])
    torch.testing.assert_close(torch.stack([pi for pi, _ in groups]), probs)
    expected = joint_multipliers(probs, sizes, torch.tensor([42.0, 91.0]))
    torch.testing.assert_close(torch.stack([omega for _, omega in groups]), expected)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL, UNEQUAL[::-1]], ids=["equal", "more keep more", "more keep less"])
def test_best_is_no_worse_than_any_recipe(power: float, weights: list[list[float]]) -> None:
    s = SPECTRUM**power
    plans = {c: Collective(cohort=c).for_groups(s, NUM_TERMS, weights) for c in ("group", "joint", "best")}
    errors = {cohort: error(groups, s, weights) for cohort, groups in plans.items()}
    assert errors["best"] <= min(errors.values()) * (1 + 1e-12)
    assert errors["joint"] < errors["group"]


def test_weights_that_are_not_used_make_joint_multipliers_worse_than_the_papers_recipe() -> None:
    """Why `joint` and `best` need the weights: a group that counts little for its size has large multipliers."""
    s = SPECTRUM**0.5
    ignored = Collective(cohort="best").for_groups(s, NUM_TERMS, EQUAL)
    used, paper = (Collective(cohort=c).for_groups(s, NUM_TERMS, UNEQUAL) for c in ("best", "group"))
    assert error(used, s, UNEQUAL) < error(paper, s, UNEQUAL) < 0.5 * error(ignored, s, UNEQUAL)


def test_every_recipe_treats_a_single_group_of_equal_clients_alike() -> None:
    for cohort in ("group", "joint", "best"):
        ((pi, omega),) = Collective(cohort=cohort).for_groups(SPECTRUM, [13], [[7.0] * 10])
        assert torch.equal(pi, Collective()(SPECTRUM, 13, 10)[0])
        torch.testing.assert_close(omega, Collective()(SPECTRUM, 13, 10)[1])


@pytest.mark.parametrize("cohort", ["joint", "best"])
def test_clients_without_examples_do_not_count_unless_all_have_none(cohort: str) -> None:
    plan = Collective(cohort=cohort)  # type: ignore[arg-type]
    nobody, equal = (plan.for_groups(SPECTRUM, NUM_TERMS, w) for w in ([[0.0] * 6, [0.0] * 4], EQUAL))
    for (pi, omega), (expected_pi, expected_omega) in zip(nobody, equal, strict=True):
        assert torch.equal(pi, expected_pi)
        torch.testing.assert_close(omega, expected_omega)
    idle, alone = (plan.for_groups(SPECTRUM, NUM_TERMS[:k], w) for k, w in ((2, [[5.0] * 6, [0.0]]), (1, [[5.0] * 6])))
    torch.testing.assert_close(idle[0], alone[0])
    assert bool(torch.isfinite(idle[1][1]).all())
    assert bool((idle[1][1] > 0).all())


def test_published_figures_of_the_mix_are_reproduced() -> None:
    """Relative discrepancies of six clients at 0.2 and four at 0.4 on 1/i, N = 64: .0150 by groups, .0095 jointly."""
    assert error(Collective().for_groups(SPECTRUM, NUM_TERMS, EQUAL)) == pytest.approx(0.0150, abs=5e-5)
    assert error(Collective(cohort="joint").for_groups(SPECTRUM, NUM_TERMS, EQUAL)) == pytest.approx(0.0095, abs=5e-5)
    assert error(Unbiased().for_groups(SPECTRUM, NUM_TERMS, EQUAL)) == pytest.approx(0.0244, abs=5e-5)


def test_compensated_prism_has_inverse_marginals_exact_or_manlys() -> None:
    log_sizes = 4 * SPECTRUM.log()
    for marginals, function in (("exact", successive_inclusion_probs), ("manly", manly_inclusion_probs)):
        pi, omega = PriSM(4.0, compensation="wallenius", marginals=marginals)(SPECTRUM, 7, 10)
        assert torch.equal(pi, function(log_sizes, 7))
        torch.testing.assert_close(omega, 1 / pi)


def test_multipliers_stay_finite_where_probabilities_underflow() -> None:
    s = 10.0 ** -torch.linspace(0, 150, 64).double()
    pi, omega = PriSM(4.0, compensation="wallenius")(s, 7, 10)
    assert float(pi.min()) < 1e-200
    assert bool(torch.isfinite(omega).all())


def test_scaled_draws_have_the_norm_of_the_whole() -> None:
    strategy, generator = Scaled(PriSM()), torch.Generator().manual_seed(0)
    pi, omega = strategy(SPECTRUM, 13, 10)
    for terms in strategy.own_design(SPECTRUM, 13).fit(pi).draw(5, generator):
        scaled = strategy.drawn_multipliers(SPECTRUM, omega, terms) * SPECTRUM[terms]
        assert float(scaled.norm()) == pytest.approx(float(SPECTRUM.norm()))
    top, _ = Scaled(TopN())(SPECTRUM, 13, 10)
    assert torch.equal(top, TopN()(SPECTRUM, 13, 10)[0])
    zeros = torch.tensor([1.0, 0.0, 0.0]).double()
    assert strategy.drawn_multipliers(zeros, torch.ones(3), torch.tensor([1, 2])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Collective(cohort="all"), "`cohort` must be 'group', 'joint' or 'best', got 'all'"),
        (lambda: PriSM(compensation="fisher"), "`compensation` must be None or 'wallenius', got 'fisher'"),
        (lambda: PriSM(marginals="rough"), "`marginals` must be 'exact' or 'manly', got 'rough'"),
    ],
)
def test_invalid_options_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
