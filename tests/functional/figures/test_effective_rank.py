import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.functional import (
    entropy_rank,
    marginal_entropy,
    participation_rank,
    stable_rank,
    top_inclusion_probs,
)

RANKS = [entropy_rank, participation_rank, stable_rank]


@pytest.mark.parametrize("rank", RANKS)
def test_equal_values_count_fully_and_zeros_not_at_all(rank: object) -> None:
    assert rank(torch.tensor([2.0] * 5 + [0.0] * 3)) == pytest.approx(5.0)  # type: ignore[operator]
    assert rank(torch.zeros(4)) == 0.0  # type: ignore[operator]


@given(values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), scale=st.floats(1e-6, 1e6))
def test_ranks_lie_between_one_and_n_in_any_unit(values: list[float], scale: float) -> None:
    s = torch.tensor(values, dtype=torch.float64)
    for rank in RANKS:
        assert 1 - 1e-9 <= rank(s) <= len(values) + 1e-9
        assert rank(scale * s) == pytest.approx(rank(s), rel=1e-9)


def test_ranks_equal_their_formulas() -> None:
    values = [5.0, 2.0, 1.0, 0.5]
    shares = [v / 8.5 for v in values]
    s = torch.tensor(values)
    assert entropy_rank(s) == pytest.approx(2 ** -sum(p * math.log2(p) for p in shares))
    assert participation_rank(s) == pytest.approx(1 / sum(p * p for p in shares))
    assert stable_rank(s) == pytest.approx(sum(v * v for v in values) / 25)


def test_entropy_equals_the_formula_of_the_paper():
    probs = [1.0, 0.7, 0.2, 0.1, 0.0]
    mean = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in probs if 0 < p < 1) / 5
    even = -0.4 * math.log(0.4) - 0.6 * math.log(0.6)
    assert marginal_entropy(torch.tensor(probs, dtype=torch.float64)) == pytest.approx(mean / even, rel=1e-13)


def test_entropy_is_one_for_equal_probabilities_and_zero_without_chance():
    assert marginal_entropy(torch.full((8,), 0.375)) == 1.0
    assert marginal_entropy(top_inclusion_probs(torch.rand(8, generator=torch.Generator()), 3)) == 0.0
    assert marginal_entropy(torch.ones(8)) == 0.0


def test_no_probabilities_have_more_entropy_than_equal_ones():
    noise = torch.rand(100, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for row in noise:
        assert marginal_entropy(3 / 6 + 0.4 * (row - row.mean())) <= 1
