"""Variance figures against the enumeration of all outcomes."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional import sampled_update_variance, sampled_variance, step_size_variance

PROBS = torch.tensor([0.2, 1.0, 0.5, 0.9], dtype=torch.float64)
WEIGHTS = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def independent(probs: Tensor) -> list[tuple[float, Tensor]]:
    """Every set of active processors with its probability."""
    outcomes = []
    for pattern in itertools.product([0.0, 1.0], repeat=len(probs)):
        active = torch.tensor(pattern, dtype=torch.float64)
        outcomes.append((float(torch.where(active > 0, probs, 1 - probs).prod()), active))
    return outcomes


PAIRS = [(chance, torch.tensor(active, dtype=torch.float64)) for chance, active in [
    (0.5, [1, 1, 0, 0]), (0.2, [0, 1, 1, 0]), (0.3, [1, 0, 0, 1]),
]]  # fmt: skip


def error(outcomes: list[tuple[float, Tensor]], probs: Tensor, values: Tensor) -> float:
    """Mean squared distance between sum x / p over the active and sum x; values (P,) or (P, D)."""
    flat = values.reshape(len(values), -1)
    expanded = torch.where(probs > 0, 1 / probs, 0.0)[:, None] * flat
    return sum(chance * float(((active @ expanded) - flat.sum(0)).square().sum()) for chance, active in outcomes)


def test_independent_draws_vary_as_in_an_enumeration() -> None:
    values = torch.tensor([0.7, -1.0, 2.0, 0.3], dtype=torch.float64)
    assert abs(step_size_variance(WEIGHTS, PROBS) - error(independent(PROBS), PROBS, WEIGHTS)) < 1e-14
    assert abs(sampled_variance(values, PROBS) - error(independent(PROBS), PROBS, values)) < 1e-13
    both = torch.outer(PROBS, PROBS).fill_diagonal_(0.0) + PROBS.diag()
    assert abs(sampled_variance(values, PROBS, both) - sampled_variance(values, PROBS)) < 1e-13


def test_draws_that_depend_on_each_other_vary_as_in_an_enumeration() -> None:
    joint = sum((chance * torch.outer(active, active) for chance, active in PAIRS), torch.zeros(4, 4).double())
    probs = joint.diagonal()
    expected = error(PAIRS, probs, WEIGHTS)
    assert abs(step_size_variance(WEIGHTS, probs, joint) - expected) < 1e-14
    assert abs(step_size_variance(WEIGHTS, probs) - expected) > 0.1  # the formula for independent draws is another


@pytest.mark.parametrize("with_joint", [False, True])
def test_weight_that_is_never_drawn_counts_as_bias(with_joint: bool) -> None:
    probs = torch.tensor([0.2, 0.0, 0.5, 0.9], dtype=torch.float64)
    joint = torch.outer(probs, probs).fill_diagonal_(0.0) + probs.diag() if with_joint else None
    figure = step_size_variance(WEIGHTS, probs, joint)
    assert abs(figure - error(independent(probs), probs, WEIGHTS)) < 1e-14
    assert figure > 0.4**2
    nobody = torch.zeros(4)
    assert abs(step_size_variance(WEIGHTS, nobody) - 1) < 1e-12
    assert step_size_variance(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])) == 0  # no weight, nothing missing


def test_error_of_the_average_update_follows_from_norms() -> None:
    updates = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    figure = sampled_update_variance(updates.norm(dim=1), PROBS)
    assert abs(figure - error(independent(PROBS), PROBS, updates)) < 1e-12
    assert sampled_update_variance(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0])) == 0  # left out, as it says


@pytest.mark.parametrize(
    ("weights", "probs", "joint", "message"),
    [
        ([0.5, 0.4], [1.0, 1.0], None, "must be non-negative and sum to one, got the sum 0.9"),
        ([1.5, -0.5], [1.0, 1.0], None, "must be non-negative and sum to one"),
        ([math.nan, 1.0], [1.0, 1.0], None, "got the sum nan"),
        ([0.5, 0.5], [1.0, 1.5], None, r"`probs` must be in \[0, 1\], got 1.5 at index 1"),
        ([0.5, 0.5], [1.0, -0.5], None, "`probs` must be finite and non-negative, got -0.5"),
        ([0.5, 0.5], [1.0], None, r"each processor needs a value and a probability, got \(2,\) and \(1,\)"),
        ([0.5, 0.5], [0.5, 0.5], [[0.5]], r"`joint` must have shape \(2, 2\), got \(1, 1\)"),
        ([0.5, 0.5], [0.5, 0.5], [[0.5, 0.0], [0.0, 0.6]], "diagonal of `joint` must be `probs`"),
    ],
)
def test_bad_input_is_refused(
    weights: list[float], probs: list[float], joint: list[list[float]] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        step_size_variance(torch.tensor(weights), torch.tensor(probs), None if joint is None else torch.tensor(joint))


def test_values_that_are_not_finite_and_negative_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="values must be finite, got inf"):
        sampled_variance(torch.tensor([1.0, math.inf]), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="`norms` must be non-negative, got -1"):
        sampled_update_variance(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]))
