"""Assignment probabilities against the published closed form and the conditions of optimality."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson
from lightning_spectral.functional import (
    assignment_probs,
    fit_conditional_poisson,
    model_joint_probs,
    proportional_inclusion_probs,
)
from lightning_spectral.functional.sampling.inclusion import capped_proportional, relative

CASES = [(2, 1, 1.0), (4, 2, 1.5), (5, 3, 2.0), (6, 3, 4.7), (6, 1, 0.3)]


def some_scores(seed: int, num_processors: int, num_models: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_processors, num_models, dtype=torch.float64, generator=generator) ** 3
    return scores + 1e-3


def closed_form(scores: np.ndarray, m: float) -> np.ndarray:
    """Zhang et al. (2024), Eq. (5), line by line: k is the largest integer that fulfils the condition."""
    sums = scores.sum(1)
    order = np.argsort(sums)  # M_i <= M_{i+1}
    ordered, number = sums[order], len(sums)
    ks = range(1, number + 1)
    k = max(k for k in ks if 0 < m - number + k <= ordered[:k].sum() / ordered[k - 1] * (1 + 1e-12))
    probs = np.empty_like(scores)
    for position, i in enumerate(order):
        probs[i] = (m - number + k) * scores[i] / ordered[:k].sum() if position < k else scores[i] / sums[i]
    return probs


@pytest.mark.parametrize(("num_processors", "num_models", "active"), CASES)
@pytest.mark.parametrize("seed", range(5))
def test_probabilities_are_the_published_ones(num_processors: int, num_models: int, active: float, seed: int) -> None:
    scores = some_scores(seed, num_processors, num_models)
    probs = assignment_probs(scores, active).numpy()
    assert np.abs(probs - closed_form(scores.numpy(), active)).max() < 1e-13


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


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 4), st.floats(0, 1), st.integers(0, 10**6), st.sampled_from([1e-200, 1, 1e200])
)
def test_rows_are_at_most_one_and_all_sum_to_active(
    num_processors: int, num_models: int, share: float, seed: int, unit: float
) -> None:
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


def test_nobody_is_active_if_none_may_be() -> None:
    assert torch.equal(assignment_probs(torch.ones(3, 2), 0), torch.zeros(3, 2, dtype=torch.float64))
    assert torch.equal(capped_proportional(relative(torch.ones(3, dtype=torch.float64)), 0.0), torch.zeros(3).double())


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
        joint = model_joint_probs(joint_of_processors, probs, model)
        assert torch.allclose(joint, expected, rtol=0, atol=1e-11)


def test_joint_probabilities_of_other_processors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`processor_joint` must have shape \(2, 2\), got \(3, 3\)"):
        model_joint_probs(torch.eye(3), torch.full((2, 1), 0.5), model=0)
