"""Inclusion probabilities against the published algorithms, general optimisers, and the optimality conditions."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson
from lightning_spectral.functional.sampling.conditional_poisson import fit_conditional_poisson
from lightning_spectral.functional.sampling.inclusion import (
    assignment_probs,
    collective_inclusion_probs,
    collective_multipliers,
    model_joint_probs,
    proportional_inclusion_probs,
    schatten_inclusion_probs,
    top_inclusion_probs,
)

COHORTS = [1, 1.5, 2, 4, 10, 1000]


def algorithm_1(lam: np.ndarray, n: int) -> np.ndarray:
    """Korzhenkov & Louizos (2024), Algorithm 1, line by line. Needs descending positive values and 0 < n < N."""
    best_error, best = math.inf, None
    for t in range(n):
        tail = lam[t:].sum()
        if lam[t] < tail / (n - t):
            pi = np.ones(len(lam))
            pi[t:] = (n - t) * lam[t:] / tail
            error = (lam**2 * (1 / pi - 1)).sum()
            if error < best_error:
                best_error, best = error, pi
    assert best is not None
    return best


def algorithm_2(lam: np.ndarray, n: int, C: float, sign: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 2, line by line; line 30 with the sign corrected, or as printed for ``sign=-1``."""
    N = len(lam)
    best_pi = (np.arange(N) < n).astype(float)
    best_w = best_pi.copy()
    best_error = -(lam[:n] ** 2).sum()
    for t in range(n):
        error_t = -(lam[:t] ** 2).sum()
        for u in range(1, N - t + 1):
            active = lam[t : t + u]
            root = math.sqrt(C) * active.sum() / ((n - t) * (C - 1) + u)
            previous = lam[t - 1] if t else math.inf  # lambda_0 is not defined in the paper: no constraint
            below = lam[t] / math.sqrt(C) < root <= previous / math.sqrt(C)
            if below and root < lam[t + u - 1] * math.sqrt(C):
                pi, w = np.zeros(N), np.zeros(N)
                pi[:t] = w[:t] = 1
                pi[t : t + u] = (active * math.sqrt(C) / root - 1) / (C - 1)
                w[t : t + u] = math.sqrt(C) * root / active
                error = sign * (error_t - C / (C - 1) * (active * (active - root / math.sqrt(C))).sum())
                if error < best_error:
                    best_error, best_pi, best_w = error, pi, w
    return best_pi, best_w


def random_spectra(count: int, seed: int, max_terms: int = 14):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        N = int(rng.integers(2, max_terms))
        lam = rng.choice([rng.random(N) + 0.01, 1 / np.arange(1, N + 1) ** rng.uniform(0.3, 3), np.exp(-np.arange(N))])
        yield np.sort(lam)[::-1].copy(), int(rng.integers(1, N)), float(rng.choice([1.5, 2, 3, 10, 100]))


spectra = st.lists(
    st.one_of(
        st.just(0.0),
        st.sampled_from([1.0, 2.0, 3.0]),  # ties
        st.floats(-15, 0).map(lambda e: 10.0**e),  # fifteen decades
        st.floats(0.1, 10),
    ),
    min_size=1,
    max_size=24,
)


@st.composite
def problems(draw):
    lam = torch.tensor(draw(spectra), dtype=torch.float64)
    return lam, draw(st.integers(1, len(lam))), draw(st.sampled_from([1.5, 2.0, 3.7, 10.0, 1e3, 1e6]))


def test_proportional_equals_algorithm_1_of_the_paper():
    for lam, n, _ in random_spectra(300, seed=0):
        expected = algorithm_1(lam, n)
        np.testing.assert_allclose(proportional_inclusion_probs(torch.tensor(lam), n).numpy(), expected, atol=4e-15)


def test_collective_equals_algorithm_2_of_the_paper_with_the_sign_corrected():
    differs_from_top_n = 0
    for lam, n, C in random_spectra(300, seed=1):
        pi = collective_inclusion_probs(torch.tensor(lam), n, C)
        expected, multipliers = algorithm_2(lam, n, C)
        # Rounding grows like 1 / (C - 1) in both: 2 for the smallest C here.
        np.testing.assert_allclose(pi.numpy(), expected, atol=2e-14)
        drawn = expected > 1e-12
        np.testing.assert_allclose(collective_multipliers(pi, C).numpy()[drawn], multipliers[drawn], rtol=1e-12)
        differs_from_top_n += not np.array_equal(expected, np.arange(len(lam)) < n)
    assert differs_from_top_n > 100


def collective_by_bisection(lam: np.ndarray, n: int, C: float) -> np.ndarray:
    """The water level by 300 halvings of its logarithm: the slow obvious way."""
    low, high = math.log(lam[lam > 0].min() / C), math.log(lam.max())
    for _ in range(300):
        middle = (low + high) / 2
        pi = ((lam / math.exp(middle) - 1) / (C - 1)).clip(0, 1)
        low, high = (middle, high) if pi.sum() > n else (low, middle)
    return pi


@pytest.mark.slow
def test_collective_finds_the_water_level_where_terms_and_break_points_coincide():
    """Ties, and values whose ratio is C: here an unguarded Newton's method would never leave two break points."""
    rng = np.random.default_rng(3)
    for k in range(600):
        N, C = int(rng.integers(2, 60)), float(rng.choice([1.5, 2, 10, 1e6]))
        lam = [rng.choice([1, 2, 3, 10.0], N), rng.choice([0, 1, 1e-9, C, 1 / C], N), 10.0 ** rng.uniform(-15, 0, N)][
            k % 3
        ]
        n = int(rng.integers(1, N))
        if (lam > 0).sum() > n:
            pi = collective_inclusion_probs(torch.tensor(lam), n, C).numpy()
            np.testing.assert_allclose(pi, collective_by_bisection(lam, n, C), atol=1e-12)
    lam = torch.tensor([1.0] * 8 + [2.0] * 12 + [3.0] * 12 + [10.0] * 14, dtype=torch.float64)  # 12 (5 / L - 2) = 12
    pi = collective_inclusion_probs(lam, 26, 2)
    assert pi[[0, 8, 20, 32]].tolist() == pytest.approx([0, 0.2, 0.8, 1], abs=1e-15)


def test_algorithm_2_as_printed_always_returns_top_n():
    for lam, n, C in random_spectra(100, seed=2):
        assert np.array_equal(algorithm_2(lam, n, C, sign=-1)[0], np.arange(len(lam)) < n)


def test_no_other_multipliers_beat_the_collective_ones():
    """Eq. (22): the error as a function of the multipliers, term by term, against a fine grid."""
    C, grid = 4.0, np.linspace(0, 8, 2001)
    for pi in (0.05, 0.3, 0.9, 1.0):
        error = 1 + grid * pi * (-2 + grid / C + grid * pi * (C - 1) / C)
        best = collective_multipliers(torch.tensor([pi], dtype=torch.float64), C).item()
        assert abs(grid[error.argmin()] - best) <= grid[1]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems())
def test_proportional_satisfies_its_definition(problem):
    lam, n, _ = problem
    pi = proportional_inclusion_probs(lam, n)
    assert pi.sum().item() == pytest.approx(n, rel=1e-12)
    assert ((pi >= 0) & (pi <= 1)).all()
    order = lam.argsort(stable=True)
    if (lam > 0).sum() > n:
        assert (pi[order].diff() >= 0).all()  # larger terms are never less likely
        ratio = pi[lam > 0] / lam[lam > 0]
        # pi = min(1, c s): one slope below the cap, no larger slope at it.
        below = pi[lam > 0] < 1
        slope = ratio[below].max()
        assert ratio[below].min().item() == pytest.approx(slope.item(), rel=1e-12)
        assert (ratio[~below] <= slope * (1 + 1e-12)).all()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(problems())
def test_collective_satisfies_the_optimality_conditions(problem):
    lam, n, C = problem
    pi = collective_inclusion_probs(lam, n, C)
    assert pi.sum().item() == pytest.approx(n, rel=1e-12)
    assert ((pi >= 0) & (pi <= 1)).all()
    if (lam > 0).sum() > n:
        assert (pi[lam.argsort(stable=True)].diff() >= 0).all()
        # Marginal gains lam^2 C / (1 + (C - 1) pi)^2: equal inside, larger at one, smaller at zero.
        # In units of the level, lam / (1 + (C - 1) pi), where equality can be tested with a relative tolerance.
        gain = lam / (1 + (C - 1) * pi)
        # pi near one carries a rounding error of 1e-16, relative to the level.
        assert gain[pi < 1].max() <= gain[pi > 0].min() * (1 + 1e-12)


@pytest.mark.parametrize("C", COHORTS)
@pytest.mark.parametrize("n", range(1, 8))
def test_collective_is_top_n_across_a_spectral_gap_of_ratio_c(n, C):
    lam = 2.0 ** -torch.arange(8, dtype=torch.float64)
    lam[n:] = lam[n:] / (2 * C)  # s_n >= C s_(n+1)
    assert torch.equal(collective_inclusion_probs(lam, n, C), top_inclusion_probs(lam, n))
    assert torch.equal(collective_inclusion_probs(lam.flip(0), n, C), top_inclusion_probs(lam.flip(0), n))
    below_the_gap = torch.tensor([1.0, 1 / (C - 0.1)], dtype=torch.float64)
    assert C == 1 or 0 < collective_inclusion_probs(below_the_gap, 1, C)[1] < 1


def test_collective_tends_to_the_unbiased_design_for_many_clients():
    lam = 1 / torch.arange(1, 65, dtype=torch.float64)
    limit = proportional_inclusion_probs(lam, 7)
    worst = [float((collective_inclusion_probs(lam, 7, C) - limit).abs().max()) for C in (1e2, 1e4, 1e6, 1e9)]
    # pi_C - pi = (u s / tail - 1) / (C - 1) exactly, on a common active set: below 8 / C here.
    assert all(error <= 8 / C for error, C in zip(worst, (1e2, 1e4, 1e6, 1e9), strict=True))


def test_collective_error_is_at_most_the_unbiased_error_divided_by_the_cohort():
    for lam, n, C in random_spectra(100, seed=5):
        pi = collective_inclusion_probs(torch.tensor(lam), n, C).numpy()
        collective = (lam**2 * (1 - pi) / (1 + (C - 1) * pi)).sum()
        unbiased = (lam**2 * (1 / proportional_inclusion_probs(torch.tensor(lam), n).numpy() - 1)).sum()
        assert collective <= unbiased / C * (1 + 1e-12)


@pytest.mark.parametrize("C", [1, 1 + 1e-9])
def test_one_client_is_best_served_by_the_top_terms(C):
    lam = torch.tensor([2.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    assert collective_inclusion_probs(lam, 2, C).tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("C", [1 + 1e-5, 1.001, 1e12, 1e100])
def test_extreme_cohorts_keep_the_sum(C):
    lam = torch.tensor([1.0, 1.0, 1.0, 0.999999, 0.5, 1e-9], dtype=torch.float64)
    # The rounding error of a probability is that of s / level divided by C - 1.
    assert collective_inclusion_probs(lam, 2, C).sum().item() == pytest.approx(2, abs=1e-14 * C / (C - 1))


SOLVERS = [top_inclusion_probs, proportional_inclusion_probs, lambda lam, n: collective_inclusion_probs(lam, n, 4)]


@pytest.mark.parametrize("solve", SOLVERS)
def test_zero_terms_only_fill_up_in_the_order_given(solve):
    lam = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert solve(lam, 2).tolist() == [0, 1, 0, 1, 0]
    assert solve(lam, 3).tolist() == [1, 1, 0, 1, 0]
    assert solve(lam, 4).tolist() == [1, 1, 1, 1, 0]
    assert solve(lam, 1)[[0, 2, 4]].tolist() == [0, 0, 0]
    assert solve(torch.zeros(3), 2).tolist() == [1, 1, 0]


@pytest.mark.parametrize("solve", SOLVERS)
def test_all_terms_are_certain_when_all_are_drawn(solve):
    assert solve(torch.tensor([1e-15, 3.0, 0.0, 3.0]), 4).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_answer_has_the_type_of_the_input(solve, dtype):
    assert solve(torch.tensor([3.0, 1.0, 1.0], dtype=dtype), 2).dtype == dtype


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_the_unit_of_the_values_does_not_matter(solve, scale):
    lam = torch.tensor([3.0, 2.0, 0.1, 1e-3, 1e-7], dtype=torch.float64)
    torch.testing.assert_close(solve(scale * lam, 2), solve(lam, 2), rtol=1e-12, atol=0)


def test_steep_spectra_keep_their_sum_where_prefix_sums_lose_it():
    lam = torch.cat([torch.ones(3), torch.full((50,), 1e-17)]).double()
    for solve in SOLVERS[1:]:
        assert solve(lam, 5).sum().item() == pytest.approx(5, rel=1e-12)
    # The negative control: the tail as a difference of prefix sums is zero.
    assert lam.sum() - lam[:3].sum() == 0


@pytest.mark.parametrize("solve", SOLVERS)
@pytest.mark.parametrize(
    ("lam", "n", "message"),
    [
        ([1.0, 2.0], 0, r"`num_terms` must be in \[1, N=2\], got 0"),
        ([1.0, 2.0], 3, r"`num_terms` must be in \[1, N=2\], got 3"),
        ([1.0, -2.0], 1, "got -2.0 at index 1"),
        ([math.nan, 2.0], 1, "got nan at index 0"),
        ([1.0, math.inf], 1, "got inf at index 1"),
        ([[1.0, 2.0]], 1, r"shape \(N,\).*got shape \(1, 2\)"),
        ([], 1, r"got shape \(0,\)"),
        ([1, 2], 1, "floating-point tensor, got torch.int64"),
    ],
)
def test_bad_input_is_named(solve, lam, n, message):
    with pytest.raises(ValueError, match=message):
        solve(torch.tensor(lam), n)


@pytest.mark.parametrize("C", [0, 0.5, -1, math.nan, math.inf])
def test_bad_cohorts_are_named(C):
    with pytest.raises(ValueError, match=f"`cohort_size` must be at least 1 and finite, got {C}"):
        collective_inclusion_probs(torch.ones(3), 1, C)
    with pytest.raises(ValueError, match=f"got {C}"):
        collective_multipliers(torch.ones(3), C)


def bound(s: np.ndarray, pi: np.ndarray, p: float) -> float:
    """Eq. (10) of the paper, inside the root."""
    return float((s**p * (1 - pi + pi * (1 / np.maximum(pi, 1e-300) - 1) ** p))[s > 0].sum())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_singular", "n", "p"), [(6, 2, 4), (8, 3, 3), (8, 7, 4), (10, 4, 6), (12, 3, 4)])
def test_no_constrained_optimiser_finds_better(num_singular: int, n: int, p: float) -> None:
    rng = np.random.default_rng(0)
    s = rng.random(num_singular) + 0.05
    ours = bound(s, schatten_inclusion_probs(torch.tensor(s), n, p).numpy(), p)
    for _ in range(4):
        theirs = minimize(
            lambda pi: bound(s, pi, p),
            np.clip(rng.dirichlet(np.ones(num_singular)) * n, 0.01, 0.99),
            bounds=[(1e-6, 1.0)] * num_singular,
            constraints={"type": "eq", "fun": lambda pi: pi.sum() - n},
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert ours <= theirs.fun * (1 + 1e-12)


@given(
    logs=st.lists(st.floats(-15, 0), min_size=2, max_size=30),
    zeros=st.integers(0, 3),
    ties=st.booleans(),
    share=st.floats(0.0, 1.0),
    p=st.sampled_from([2.0, 2.5, 4.0, 8.0]),
)
@settings(deadline=None, max_examples=10)
def test_kkt_conditions_hold(logs: list[float], zeros: int, ties: bool, share: float, p: float) -> None:
    values = [10.0**x for x in (logs + logs[:2] if ties else logs)] + [0.0] * zeros
    s = torch.tensor(values, dtype=torch.float64)
    n = 1 + int(share * (len(values) - 2))
    pi = schatten_inclusion_probs(s, n, p)
    assert abs(float(pi.sum()) - n) < 1e-9
    assert bool(((pi >= 0) & (pi <= 1)).all())
    assert bool((pi[s.argsort(descending=True, stable=True)].diff() <= 1e-9).all())
    inner = (pi > 1e-9) & (pi < 1 - 1e-3) & (s > 0)
    x = 1 / pi[inner] - 1
    log_price = p * s[inner].log() + (1 + p * x ** (p - 1) + (p - 1) * x**p).log()
    if len(log_price) > 1:  # all inner terms have the same price
        assert float(log_price.max() - log_price.min()) < 1e-6
    if int((s > 0).sum()) > n:  # otherwise the first zero terms fill up, and flipping changes which those are
        torch.testing.assert_close(schatten_inclusion_probs(7.5 * s.flip(0), n, p).flip(0), pi, rtol=1e-9, atol=1e-7)


def test_order_two_is_unbiased() -> None:
    s = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(schatten_inclusion_probs(s, 30, 2.0), proportional_inclusion_probs(s, 30))


def test_small_terms_are_proportional_for_any_order() -> None:
    s = torch.tensor([1.0] * 9 + [1e-3, 2e-3, 4e-3], dtype=torch.float64)
    for p in (2.0, 4.0, 8.0):
        pi = schatten_inclusion_probs(s, 3, p)
        torch.testing.assert_close(pi[9:] / pi[9], torch.tensor([1.0, 2.0, 4.0]).double(), rtol=1e-2, atol=0)


CASES = [(2, 1, 1.0), (4, 2, 1.5), (5, 3, 2.0), (6, 3, 4.7), (6, 1, 0.3)]


def some_scores(seed: int, num_processors: int, num_models: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_processors, num_models, dtype=torch.float64, generator=generator) ** 3 + 1e-3


def closed_form(scores: np.ndarray, m: float) -> np.ndarray:
    """Zhang et al. (2024), Eq. (5), line by line: k is the largest integer that fulfils the condition."""
    sums = scores.sum(1)
    order = np.argsort(sums)  # M_i <= M_{i+1}
    ordered, number = sums[order], len(sums)
    k = max(k for k in range(1, number + 1) if 0 < m - number + k <= ordered[:k].sum() / ordered[k - 1] * (1 + 1e-12))
    probs = np.empty_like(scores)
    for position, i in enumerate(order):
        probs[i] = (m - number + k) * scores[i] / ordered[:k].sum() if position < k else scores[i] / sums[i]
    return probs


@pytest.mark.parametrize(("num_processors", "num_models", "active"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_the_published_ones(num_processors: int, num_models: int, active: float, seed: int) -> None:
    scores = some_scores(seed, num_processors, num_models)
    assert np.abs(assignment_probs(scores, active).numpy() - closed_form(scores.numpy(), active)).max() < 1e-13


def test_conditions_of_optimality_hold_and_would_notice_an_error() -> None:
    scores = some_scores(1, 6, 3)
    probs = assignment_probs(scores, 4.7)
    open_rows = probs.sum(1) < 1 - 1e-9
    assert 0 < int(open_rows.sum()) < 6

    def slack(scores: Tensor, probs: Tensor) -> float:
        """Within a row, and among open rows, U / p is one number; in certain rows it is at least that."""
        quotients = scores / probs
        level = quotients[open_rows].mean()
        spread = float((quotients - quotients.mean(1, keepdim=True)).abs().max() / level)
        among_open = float((quotients[open_rows] / level - 1).abs().max())
        return max(spread, among_open, float((1 - quotients[~open_rows] / level).clamp(min=0).max()))

    assert slack(scores, probs) < 1e-12
    assert slack(scores, probs * torch.linspace(0.9, 1.0, 6)[:, None]) > 1e-2


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 4),
    st.just(0.0) | st.floats(1e-9, 1),
    st.integers(0, 10**6),
    st.sampled_from([1e-200, 1, 1e200]),
)
def test_rows_are_at_most_one_and_all_sum_to_active(num_processors, num_models, share, seed, unit):
    scores = some_scores(seed, num_processors, num_models)
    scores = torch.where(scores > scores.median() / 4, scores, 0.0)  # some zeros
    active = share * num_processors
    probs = assignment_probs(scores * unit, active)
    expected = min(active, float((scores.sum(1) > 0).sum()))
    assert abs(float(probs.sum()) - expected) < 1e-12
    assert float(probs.min()) >= 0
    assert float(probs.sum(1).max()) <= 1 + 1e-15
    assert torch.equal(probs > 0, (scores > 0) & (expected > 0))
    assert torch.allclose(probs, assignment_probs(scores, active), rtol=1e-12, atol=0)


def test_one_model_and_a_whole_number_is_the_problem_of_singular_values() -> None:
    scores = some_scores(2, 9, 1)
    for active in range(1, 10):
        assert torch.equal(assignment_probs(scores, active)[:, 0], proportional_inclusion_probs(scores[:, 0], active))


def test_processors_without_a_score_get_zero_and_the_others_at_most_one() -> None:
    scores = torch.tensor([[0.0, 0.0], [3.0, 1.0], [0.0, 5.0]])
    expected = torch.tensor([[0.0, 0.0], [0.75, 0.25], [0.0, 1.0]], dtype=torch.float64)
    for active in (2, 2.5, 3):
        assert torch.allclose(assignment_probs(scores, active), expected, rtol=1e-15, atol=0)
    assert torch.equal(assignment_probs(torch.zeros(3, 2), 2), torch.zeros(3, 2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("scores", "active", "message"),
    [
        (torch.tensor([[1.0, -2.0]]), 1, "non-negative, got -2.0 of processor 0, model 1"),
        (torch.tensor([[1.0], [math.nan]]), 1, "got nan of processor 1, model 0"),
        (torch.tensor([[1.0], [math.inf]]), 1, "got inf of processor 1, model 0"),
        (torch.ones(2, 2), 2.5, r"in \[0, P=2\], the number of processors, got 2.5"),
        (torch.ones(2, 2), -0.5, "number of processors, got -0.5"),
        (torch.ones(2, 2), math.nan, "number of processors, got nan"),
        (torch.ones(2), 1, r"must have shape \(P, S\) with P, S >= 1, got shape \(2,\)"),
        (torch.ones(2, 0), 1, r"got shape \(2, 0\)"),
    ],
)
def test_bad_input_is_refused(scores: Tensor, active: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assignment_probs(scores, active)


def test_joint_probabilities_of_a_model_by_enumeration() -> None:
    probs = assignment_probs(some_scores(3, 5, 3) + 0.5, 3)
    rows = probs.sum(1)
    assert float(rows.max()) < 1
    joint_of_processors = ConditionalPoisson().joint_inclusion_probs(rows)
    # rejective sampling: working odds from the design, subsets of three by their product
    working = fit_conditional_poisson(rows)
    odds = working / (1 - working)
    subsets = list(itertools.combinations(range(5), 3))
    chances = torch.stack([odds[list(subset)].prod() for subset in subsets])
    chances = chances / chances.sum()
    for model in range(3):
        expected = torch.zeros(5, 5, dtype=torch.float64)
        for subset, chance in zip(subsets, chances, strict=True):
            for choice in itertools.product(range(3), repeat=3):
                picks = [probs[p, s] / rows[p] for p, s in zip(subset, choice, strict=True)]
                trains = torch.zeros(5, dtype=torch.float64)
                trains[[p for p, s in zip(subset, choice, strict=True) if s == model]] = 1
                expected += chance * torch.stack(picks).prod() * torch.outer(trains, trains)
        assert torch.allclose(model_joint_probs(joint_of_processors, probs, model), expected, rtol=0, atol=1e-11)


def test_joint_probabilities_of_other_processors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`processor_joint` must have shape \(2, 2\), got \(3, 3\)"):
        model_joint_probs(torch.eye(3), torch.full((2, 1), 0.5), model=0)
