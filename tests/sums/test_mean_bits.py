"""Means of bits against fractions, in any order and over several processes."""

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import pytest
import torch
from peers import merge
from torch import Tensor

from lightning_spectral.sums import MeanBits
from lightning_spectral.sums.exact_sum import MOST_TERMS

N = 37


def clients(weights: Iterable[float]) -> list[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(N, generator=generator) < 0.5, weight) for weight in weights]


def mean_of(added: Iterable[tuple[Tensor, float]], total: float) -> MeanBits:
    mean = MeanBits(N, total)
    for bits, weight in added:
        mean.add(bits, weight)
    return mean


def test_the_mean_does_not_depend_on_the_order_where_a_plain_sum_does() -> None:
    weights, total = (0.1, 0.2, 0.3, 0.7), 1.3
    orders = list(itertools.permutations(clients(weights)))
    means = [mean_of(order, total).finish() for order in orders]
    assert all(torch.equal(mean, means[0]) for mean in means)
    plain = {tuple(sum(w * bits.double() for bits, w in order).tolist()) for order in orders}
    assert len(plain) > 1  # or the test would show nothing


def test_it_does_not_depend_on_how_clients_are_split_over_processes() -> None:
    added = clients((0.1, 0.2, 0.3, 0.7, 0.0))
    whole = mean_of(added, 1.3)
    for split in range(len(added) + 1):
        mine, theirs = mean_of(added[:split], 1.3), mean_of(added[split:], 1.3)
        merge(mine, theirs)
        assert torch.equal(mine.finish(), whole.finish())
        assert torch.equal(mine.finish(prior=1.0), whole.finish(prior=1.0))
        assert (mine.weights.sum, mine.weights.num_terms) == (whole.weights.sum, whole.weights.num_terms)


@pytest.mark.parametrize("weights", [(1,), (1, 1, 1), (3, 0, 5, 11), (2**40, 1, 2**52 - 2**41, 7), (0, 0)], ids=str)
def test_the_mean_of_whole_weights_is_the_nearest_number_to_the_fraction(weights: tuple[int, ...]) -> None:
    added = clients(map(float, weights))
    expected = []
    for i in range(N):
        ones = sum((w for (bits, _), w in zip(added, weights, strict=True) if bits[i]), start=0)
        expected.append(float(Fraction(ones, max(1, sum(weights)))))
    assert mean_of(added, float(sum(weights))).finish().tolist() == expected


def test_weights_that_are_rounded_change_the_mean_by_their_rounding_alone() -> None:
    """Each weight by at most 2^-52 of the total, numerator and denominator by K times that for K clients."""
    weights = [0.1 + i / 7 for i in range(50)]
    added, total = clients(weights), math.fsum(weights)
    mean = mean_of(added, total).finish().tolist()
    for i in range(N):
        exact = sum(Fraction(w) for bits, w in added if bits[i]) / sum(map(Fraction, weights))
        assert abs(Fraction(mean[i]) - exact) <= Fraction(2 * 50 + 1, 2**52)


@pytest.mark.parametrize("prior", [0.5, 1.0, 10.0])
def test_smoothing_adds_pseudo_counts_of_both_outcomes(prior: float) -> None:
    added = clients([1.0] * 6)
    added = [(bits.index_fill(0, torch.tensor([0]), True), weight) for bits, weight in added]
    mean = mean_of(added, 6.0)
    counts = [sum(int(bits[i]) for bits, _ in added) for i in range(N)]
    assert mean.finish().tolist() == [count / 6 for count in counts]
    assert mean.finish(prior).tolist() == pytest.approx([(count + prior) / (6 + 2 * prior) for count in counts])
    assert mean.finish()[0] == 1.0
    assert (mean.finish(prior) < 1).all()
    # unequal weights: K times the weighted mean takes the place of the count
    weighted = mean_of(clients([1.0, 2.0, 5.0]), 8.0)
    expected = [(3 * z + prior) / (3 + 2 * prior) for z in weighted.finish().tolist()]
    assert weighted.finish(prior).tolist() == pytest.approx(expected)


def test_without_clients_the_mean_is_0_and_the_smoothed_one_a_half() -> None:
    assert MeanBits(2, total_weight=3.0).finish().tolist() == [0.0, 0.0]
    assert MeanBits(2, total_weight=3.0).finish(prior=1.0).tolist() == [0.5, 0.5]


def test_nothing_is_rounded_so_only_the_counts_travel_between_processes() -> None:
    mean = mean_of(clients([1.0, 3.0]), 4.0)
    assert mean.sums == []
    (total,) = mean.totals
    assert total.dtype == torch.float64
    assert total is mean.totals[0]  # added up in place
    assert (total / mean.weights.sum).tolist() == mean.finish().tolist()


def test_weights_out_of_range_and_too_many_clients_are_refused() -> None:
    bits = torch.ones(N, dtype=torch.bool)
    for weight in (-1.0, 11.0, math.nan):
        with pytest.raises(ValueError, match="must be between 0 and the total of 10, got"):
            MeanBits(N, 10.0).add(bits, weight)
    with pytest.raises(ValueError, match="sum to more than `total_weight`=10; give the sum of all"):
        mean_of([(bits, 6.0), (bits, 6.0)], 10.0)
    for total in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="`total_weight` must be finite and at least 0, got"):
            MeanBits(N, total)
    full = mean_of([], 0.0)
    full.weights.count(0, MOST_TERMS)
    with pytest.raises(OverflowError, match="room for 8192 terms; ask fewer clients"):
        merge(full, mean_of([(bits, 0.0)], 0.0))


def test_one_bit_is_not_taken_for_all() -> None:
    with pytest.raises(ValueError, match=r"Bits of shape \(3,\) are averaged, got \(1,\)"):
        MeanBits(3, total_weight=1).add(torch.tensor([True]), weight=1)
