"""Means of bits against fractions, in any order and over several processes."""

import itertools
from collections.abc import Iterable
from fractions import Fraction

import pytest
import torch
from peers import merge
from torch import Tensor

from lightning_spectral.sums import MeanBits

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
    assert not mean.coarse
    (total,) = mean.totals(())
    assert total.dtype == torch.int64
    assert total is mean.totals(())[0]  # added up in place
    assert (total / mean.weights.sum).tolist() == mean.finish().tolist()


def test_one_bit_is_not_taken_for_all() -> None:
    with pytest.raises(ValueError, match=r"Bits of shape \(3,\) are averaged, got \(1,\)"):
        MeanBits(3, total_weight=1).add(torch.tensor([True]), weight=1)
