import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from lightning_spectral.functional.figures import (
    cohort_discrepancy,
    coordinated_discrepancy,
    expected_coverage,
    group_discrepancy,
)
from lightning_spectral.functional.sampling.cohorts import (
    coordinated_multipliers,
    draw_coordinated,
    joint_discrepancy,
    joint_multipliers,
    kish_size,
)
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, collective_multipliers


def rows(per_group: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return per_group.repeat_interleave(sizes.long(), dim=0)


def enumerated_error(s: torch.Tensor, probs: torch.Tensor, omega: torch.Tensor, weights: torch.Tensor) -> float:
    """E sum_i s_i^2 (1 - sum_c a_c omega_ci z_ci)^2 over all outcomes of independent indicators z."""
    z = torch.tensor(list(itertools.product([0.0, 1.0], repeat=len(probs)))).double()[:, :, None]
    chances = (z * probs + (1 - z) * (1 - probs)).prod(1)
    return float((chances * (1 - (z * weights[:, None] * omega).sum(1)) ** 2 @ s**2).sum())


@pytest.fixture
def mixed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Singular values, the inclusion probabilities of two groups, and the group sizes."""
    s = 1 / torch.arange(1, 7).double()
    return s, torch.stack([collective_inclusion_probs(s, n, 5) for n in (1, 3)]), torch.tensor([3.0, 2.0])


def test_discrepancy_is_the_enumerated_expectation(mixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    s, probs, sizes = mixed
    generator = torch.Generator().manual_seed(0)
    omega = 0.5 + torch.rand(5, 6, generator=generator).double()
    weights = torch.rand(5, generator=generator).double()
    expected = enumerated_error(s, rows(probs, sizes), omega, weights)
    assert float(cohort_discrepancy(s, rows(probs, sizes), omega, weights)) == pytest.approx(expected, rel=1e-12)


def test_group_form_is_the_papers_equation_seven() -> None:
    s = 1 / torch.arange(1, 9).double()
    pi, c = collective_inclusion_probs(s, 3, 4), 4
    omega = collective_multipliers(pi, c)
    paper = (s**2 * omega * pi * (-2 + omega / c + omega * pi * (c - 1) / c)).sum() + (s**2).sum()
    ours = group_discrepancy(s, pi, omega, c)
    torch.testing.assert_close(ours, paper, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        ours, cohort_discrepancy(s, pi.repeat(c, 1), omega.repeat(c, 1), torch.full((c,), 1 / c))
    )
    closed = (s**2 * (1 - pi) / (1 + (c - 1) * pi)).sum()
    torch.testing.assert_close(ours, closed, rtol=1e-12, atol=0)


def test_joint_multipliers_have_the_least_error(mixed: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    s, probs, sizes = mixed
    weights = torch.full((5,), 0.2).double()
    omega = rows(joint_multipliers(probs, sizes), sizes)
    best = float(cohort_discrepancy(s, rows(probs, sizes), omega, weights))
    assert best == pytest.approx(float(joint_discrepancy(s, probs, sizes)), rel=1e-12)

    def error(flat: np.ndarray) -> float:
        return float(cohort_discrepancy(s, rows(probs, sizes), torch.tensor(flat).view(5, 6), weights))

    found = minimize(error, np.ones(30), method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-12, "maxiter": 2000})
    assert best <= found.fun * (1 + 1e-9)
    assert found.fun == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("probs_seed", range(3))
def test_joint_multipliers_of_unequal_clients_have_the_least_error(probs_seed: int) -> None:
    """Against a search over one multiplier for each group and term, whose errors are enumerated."""
    s, generator = 1 / torch.arange(1, 4).double(), torch.Generator().manual_seed(probs_seed)
    probs = torch.rand(2, 3, generator=generator).double()
    weights = [[2.0, 30.0, 5.0], [7.0, 1.0]]
    flat = torch.tensor([2.0, 30.0, 5.0, 7.0, 1.0]).double() / 45
    kish = torch.tensor([37**2 / (4 + 900 + 25), 64 / 50], dtype=torch.float64)
    assert [kish_size(own) for own in weights] == pytest.approx(kish.tolist())
    omega = joint_multipliers(probs, kish, torch.tensor([37.0, 8.0]))

    def error(per_group: torch.Tensor) -> float:
        clients = torch.tensor([0, 0, 0, 1, 1])
        return enumerated_error(s, probs[clients], per_group[clients], flat)

    best = error(omega)
    assert best == pytest.approx(float(joint_discrepancy(s, probs, kish)), rel=1e-12)
    found = minimize(lambda x: error(torch.tensor(x).view(2, 3)), np.ones(6), method="BFGS")
    assert best <= found.fun * (1 + 1e-12)
    assert found.fun == pytest.approx(best, rel=1e-6)
    counted = joint_multipliers(probs, torch.tensor([3.0, 2.0]))  # as if the five were equal
    assert error(counted) > 1.05 * best


def test_a_group_without_weight_changes_nothing_and_has_multipliers_of_one() -> None:
    probs = torch.tensor([[1.0, 0.5], [0.3, 0.5], [0.3, 1.0]]).double()
    sizes, shares = torch.tensor([2.0, 3.0, 2.0]), torch.tensor([0.0, 5.0, 9.0])
    omega = joint_multipliers(probs, sizes, shares)
    assert omega[0].tolist() == [1.0, 1.0]
    assert torch.equal(omega[1:], joint_multipliers(probs[1:], sizes[1:], shares[1:]))


def test_kishs_number_is_that_of_equal_clients_with_the_same_variance() -> None:
    assert kish_size([3.0] * 7) == 7.0
    assert kish_size([10, 10, 20]) == pytest.approx(1 / (0.25**2 + 0.25**2 + 0.5**2))
    assert kish_size([5.0, 0.0]) == 1.0
    assert kish_size([0.0, 0.0]) == 2.0
    assert all(kish_size([0.1 * k] * 3 + [1e-9]) >= 1.0 for k in range(1, 20))


def test_one_group_is_the_collective_formula() -> None:
    pi = torch.tensor([1.0, 0.7, 0.2, 1e-9, 0.0]).double()
    torch.testing.assert_close(joint_multipliers(pi[None], torch.tensor([6.0]))[0], collective_multipliers(pi, 6.0))


def test_a_term_that_some_hold_for_certain_gets_zero_weight_from_all_others() -> None:
    probs = torch.tensor([[1.0, 0.5], [0.3, 0.5]]).double()
    assert joint_multipliers(probs, torch.tensor([2.0, 3.0]))[:, 0].tolist() == [2.5, 0.0]
    assert float(joint_discrepancy(torch.ones(2), probs[:, :1].expand(2, 2), torch.tensor([2.0, 3.0]))) == 0.0


def test_bad_shapes_and_empty_groups_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have shape \(G, N\)"):
        joint_multipliers(torch.ones(3), torch.ones(1))
    with pytest.raises(ValueError, match="Every group must have clients"):
        joint_multipliers(torch.ones(2, 3), torch.tensor([1.0, 0.0]))


def fixed_size_probs(weights: list[float], share: float) -> torch.Tensor:
    s = torch.tensor(weights, dtype=torch.float64)
    return collective_inclusion_probs(s, 1 + int(share * (len(weights) - 1)), 5)


@settings(deadline=None, max_examples=30)
@given(
    weights=st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=40),
    share=st.floats(0, 1),
    cohort_size=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_coordinated_clients_get_exact_sizes_and_even_counts(weights, share, cohort_size, seed):
    pi = fixed_size_probs(weights, share)
    dealt = draw_coordinated(pi, cohort_size, torch.Generator().manual_seed(seed))
    assert dealt.shape == (cohort_size, round(float(pi.sum())))
    assert bool((dealt.diff(dim=1) > 0).all())  # sorted and distinct
    counts = dealt.flatten().bincount(minlength=len(pi))
    expected = cohort_size * pi
    assert bool((counts >= (expected - 1e-9).floor()).all())
    assert bool((counts <= (expected + 1e-9).ceil()).all())


def test_each_coordinated_client_has_the_given_probabilities() -> None:
    pi = fixed_size_probs([1.0 / (i + 1) for i in range(9)], 0.4)
    generator, draws = torch.Generator().manual_seed(0), 2000
    held = torch.zeros(5, 9)
    pair = torch.zeros(9)
    for _ in range(draws):
        z = torch.zeros(5, 9).scatter_(1, draw_coordinated(pi, 5, generator), 1.0)
        held += z
        pair += z[0] * z[1]
    assert bool(((held / draws - pi).abs() <= 5 * (pi * (1 - pi) / draws).sqrt() + 1e-12).all())
    # negative control: two independent clients both hold a term with probability pi^2, these do so less often
    independent = pi**2
    spread = 5 * (independent * (1 - independent) / draws).sqrt()
    assert bool(((pair / draws - independent)[(pi > 0.05) & (pi < 0.95)] < -spread[(pi > 0.05) & (pi < 0.95)]).any())


def test_coordinated_error_is_that_of_the_counts_and_its_multipliers_are_best() -> None:
    s = 1 / torch.arange(1, 10).double()
    pi, c = fixed_size_probs(s.tolist(), 0.3), 4
    omega = coordinated_multipliers(pi, c)
    expected = 0.0
    for i in range(9):
        mean = c * float(pi[i])
        low = int(mean)
        for count, chance in ((low, 1 - (mean - low)), (low + 1, mean - low)):
            expected += chance * float(s[i]) ** 2 * (1 - float(omega[i]) * count / c) ** 2
    best = float(coordinated_discrepancy(s, pi, omega, c))
    assert best == pytest.approx(expected, rel=1e-12)
    for factor in (0.99, 1.01):
        assert float(coordinated_discrepancy(s, pi, factor * omega, c)) > best
    assert best < float(group_discrepancy(s, pi, collective_multipliers(pi, c), c))


def test_coordinated_error_of_unequal_clients_is_that_of_all_sets_of_holders() -> None:
    s, pi, omega = (
        1 / torch.arange(1, 5).double(),
        torch.tensor([1.0, 0.7, 0.25, 0.1]).double(),
        1.3 * torch.ones(4).double(),
    )
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    expected = 0.0
    for i in range(4):
        low = int(4 * float(pi[i]))
        for count, chance in ((low, 1 - (4 * float(pi[i]) - low)), (low + 1, 4 * float(pi[i]) - low)):
            holders = list(itertools.combinations(range(4), count))
            for held in holders:
                average = float(omega[i]) * sum(float(weights[c]) for c in held)
                expected += chance / len(holders) * float(s[i]) ** 2 * (1 - average) ** 2 if chance else 0.0
    found = float(coordinated_discrepancy(s, pi, omega, 4, weights))
    assert found == pytest.approx(expected, rel=1e-12)
    assert found > 1.02 * float(coordinated_discrepancy(s, pi, omega, 4))
    even = coordinated_discrepancy(s, pi, omega, 4, torch.full((4,), 0.25))
    torch.testing.assert_close(even, coordinated_discrepancy(s, pi, omega, 4))


def test_coverage_is_one_minus_the_probability_that_nobody_holds_a_term() -> None:
    probs = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)).double()
    slow = sum(1 - np.prod([1 - float(probs[c, i]) for c in range(3)]) for i in range(5)) / 5
    assert float(expected_coverage(probs)) == pytest.approx(slow, rel=1e-12)
