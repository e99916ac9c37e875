"""Strategies of mixed cohorts, and multipliers that are known only after the draw."""

import pytest
import torch

from lightning_spectral.functional import (
    cohort_discrepancy,
    collective_inclusion_probs,
    joint_multipliers,
    manly_inclusion_probs,
    successive_inclusion_probs,
)
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.work_unit import WorkUnit
from lightning_spectral.sharding import Collective, PriSM, Scaled, TopN, Unbiased

SPECTRUM = 1 / torch.arange(1, 65).double()
SIZES = [6.0, 4.0]
NUM_TERMS = [13, 26]


def error(groups: list[tuple[torch.Tensor, torch.Tensor]], s: torch.Tensor = SPECTRUM) -> float:
    rows = [(pi, omega) for (pi, omega), size in zip(groups, SIZES, strict=True) for _ in range(int(size))]
    probs, multipliers = (torch.stack(column) for column in zip(*rows, strict=True))
    return float(cohort_discrepancy(s, probs, multipliers, torch.full((10,), 0.1)) / (s**2).sum())


def test_the_papers_recipe_plans_each_group_by_itself() -> None:
    groups = Collective().for_groups(SPECTRUM, NUM_TERMS, SIZES)
    for (pi, omega), n, size in zip(groups, NUM_TERMS, SIZES, strict=True):
        alone = Collective()(SPECTRUM, n, size)
        assert torch.equal(pi, alone[0])
        assert torch.equal(omega, alone[1])


def test_joint_plans_with_the_total_and_the_best_multipliers() -> None:
    groups = Collective(cohort="joint").for_groups(SPECTRUM, NUM_TERMS, SIZES)
    probs = torch.stack([collective_inclusion_probs(SPECTRUM, n, 10) for n in NUM_TERMS])
    assert torch.equal(torch.stack([pi for pi, _ in groups]), probs)
    expected = joint_multipliers(probs, torch.tensor(SIZES))
    torch.testing.assert_close(torch.stack([omega for _, omega in groups]), expected)


@pytest.mark.parametrize("power", [0.25, 0.5, 1.0, 2.0])
def test_best_is_no_worse_than_any_recipe(power: float) -> None:
    s = SPECTRUM**power
    plans = {cohort: Collective(cohort=cohort).for_groups(s, NUM_TERMS, SIZES) for cohort in ("group", "joint", "best")}
    errors = {cohort: error(groups, s) for cohort, groups in plans.items()}
    assert errors["best"] <= min(errors.values()) * (1 + 1e-12)
    assert errors["joint"] < errors["group"]


def test_every_recipe_treats_a_single_group_alike() -> None:
    for cohort in ("group", "joint", "best"):
        ((pi, omega),) = Collective(cohort=cohort).for_groups(SPECTRUM, [13], [10.0])
        assert torch.equal(pi, Collective()(SPECTRUM, 13, 10)[0])
        assert torch.equal(omega, Collective()(SPECTRUM, 13, 10)[1])


def test_published_figures_of_the_mix_are_reproduced() -> None:
    """Relative discrepancies of six clients at 0.2 and four at 0.4 on 1/i, N = 64: .0150 by groups, .0095 jointly."""
    assert error(Collective().for_groups(SPECTRUM, NUM_TERMS, SIZES)) == pytest.approx(0.0150, abs=5e-5)
    assert error(Collective(cohort="joint").for_groups(SPECTRUM, NUM_TERMS, SIZES)) == pytest.approx(0.0095, abs=5e-5)
    assert error(Unbiased().for_groups(SPECTRUM, NUM_TERMS, SIZES)) == pytest.approx(0.0244, abs=5e-5)


def test_effective_number_of_clients_is_kishs() -> None:
    units = [WorkUnit(c, coefficient=size) for c, size in enumerate([10, 10, 20])]
    shares = [0.25, 0.25, 0.5]
    assert Cohort.effective_size(units) == pytest.approx(1 / sum(a * a for a in shares))
    assert Cohort.effective_size(units[:2]) == pytest.approx(2.0)


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
