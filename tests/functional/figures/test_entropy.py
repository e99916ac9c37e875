"""Normalised marginal entropy."""

import math

import pytest
import torch

from lightning_spectral.functional import marginal_entropy, top_inclusion_probs


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


def test_a_sum_that_is_not_whole_is_an_error():
    with pytest.raises(ValueError, match=r"whole number of terms, at least 1, got the sum 1\.5"):
        marginal_entropy(torch.full((3,), 0.5))
