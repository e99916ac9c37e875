"""Clients with few labels, and of unequal sizes: the splits by hand, and laws against their own moments."""

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.partition import Partition, Partitioner
from lightning_spectral.partition.sizes import client_shares


def split(partitioner: Partitioner, labels: Tensor, seed: int = 0) -> Partition:
    return partitioner(len(labels), labels, torch.Generator().manual_seed(seed))


def counts(labels: Tensor, partition: Partition) -> list[tuple[int, ...]]:
    num_labels = int(labels.max()) + 1
    return [tuple(labels[own].bincount(minlength=num_labels).tolist()) for own in partition]


def test_a_client_gets_any_two_shards_of_the_sorted_examples() -> None:
    labels = torch.tensor([2, 0, 1, 0, 1, 2, 0, 1, 0, 2, 1, 0])  # sorted and cut in six: 00 00 01 11 12 22
    shards = [Counter(shard) for shard in ((0, 0), (0, 0), (0, 1), (1, 1), (1, 2), (2, 2))]
    pairs = [one + other for one, other in combinations(shards, 2)]
    expected = Counter(tuple(pair[label] for label in range(3)) for pair in pairs)
    num_seeds = 800
    found = Counter(counts(labels, split(ls.ShardPartitioner(3), labels, seed))[0] for seed in range(num_seeds))
    assert found.keys() == expected.keys()
    for histogram, number in expected.items():
        share = number / len(pairs)
        assert abs(found[histogram] / num_seeds - share) <= 5 * math.sqrt(share * (1 - share) / num_seeds)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 20), st.integers(0, 2**31))
def test_clients_have_exactly_so_many_labels_and_share_them_evenly(num_labels, more, extra, seed):
    num_classes = num_labels + more
    num_clients = -(-num_classes // num_labels) + extra
    labels = torch.arange(num_classes).repeat_interleave(num_clients + torch.arange(num_classes))
    partition = split(ls.LabelsPerClient(num_clients, num_labels), labels, seed)
    assert sorted(partition.indices.tolist()) == list(range(len(labels)))
    has = np.array(counts(labels, partition))
    assert ((has > 0).sum(1) == num_labels).all()
    assert np.ptp((has > 0).sum(0)) <= 1  # how many clients a label has
    assert all(np.ptp(column[column > 0]) <= 1 for column in has.T)


def test_any_labels_come_together_equally_often() -> None:
    labels, num_seeds = torch.arange(4).repeat(5), 600
    found = Counter(counts(labels, split(ls.LabelsPerClient(5), labels, seed))[0] for seed in range(num_seeds))
    pairs = Counter(tuple(count > 0 for count in histogram) for histogram in found.elements())
    assert len(pairs) == 6
    bound = 5 * math.sqrt(1 / 6 * 5 / 6 / num_seeds)
    assert all(abs(number / num_seeds - 1 / 6) <= bound for number in pairs.values())


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (ls.ShardPartitioner(5, 5), r"num_clients=5, shards_per_client=5\) cuts 25 shards, got 20 examples"),
        (ls.LabelsPerClient(3, 5), r"`num_labels` must be at most 4, .*; got LabelsPerClient\(.*num_labels=5\)"),
        (ls.LabelsPerClient(3, 1), "`num_clients` times `num_labels` at least that"),
        (
            ls.LabelsPerClient(12, 2),
            r"\(num_clients=12, num_labels=2\) cannot deal 5 examples of a label to 6 clients; lower its",
        ),
    ],
)
def test_numbers_that_cannot_be_dealt_are_refused(partitioner: Partitioner, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split(partitioner, torch.arange(4).repeat(5))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(0, 500))
def test_sizes_are_whole_parts_in_proportion(sizes, spare):
    total, quota = len(sizes) + spare, np.array(sizes) / sum(sizes)
    order, shares = client_shares(sizes, total, len(sizes), torch.Generator())
    found = shares[order.argsort()].numpy()
    assert found.sum() == total
    assert found.min() >= 1
    if (total * quota >= 1).all():
        assert (np.abs(found - total * quota) < 1 + 1e-9).all()
    else:  # those that would have less than one example have one, at the cost of all others
        assert (found[total * quota < 1] == 1).all()
        assert (found <= np.maximum(np.ceil(total * quota), 1)).all()


def drawn(law: ls.SizeLaw, num_clients: int, num_samples: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([sizes / sizes.sum() for sizes in (law(num_clients, rng) for _ in range(num_samples))])


@pytest.mark.parametrize(("spread", "holds"), [(0.5, True), (1.0, False)])
def test_laws_have_their_own_moments(spread: float, holds: bool) -> None:
    # Dirichlet with concentration a for each of N: the second moment of a share is (a + 1) / (N (N a + 1))
    squares = drawn(ls.SizeLaw("dirichlet", spread), 10, 4000)[:, 0] ** 2
    near = abs(squares.mean() - (2 + 1) / (10 * (10 * 2 + 1))) <= 5 * squares.std() / math.sqrt(4000)
    logarithms = np.log(drawn(ls.SizeLaw("lognormal", spread), 20_000, 1)[0])
    deviation = 5 * 0.5 / math.sqrt(2 * 20_000)  # of a standard deviation of normal variables
    inside = float((np.abs(logarithms - logarithms.mean()) < 0.5).mean())
    assert near == holds
    assert (abs(logarithms.std() - 0.5) <= deviation) == holds
    assert (abs(inside - math.erf(math.sqrt(0.5))) <= 5 * math.sqrt(0.25 / 20_000)) == holds
    powers = drawn(ls.SizeLaw("power", spread), 5, 2000)
    assert np.allclose(np.sort(powers)[:, ::-1] / powers.max(1, keepdims=True), np.arange(1.0, 6.0) ** -spread)
    largest = np.bincount(powers.argmax(1), minlength=5) / 2000
    assert (np.abs(largest - 0.2) <= 5 * math.sqrt(0.2 * 0.8 / 2000)).all()


def test_unequal_clients_may_have_skewed_labels_too() -> None:
    labels, sizes = torch.arange(10).repeat(24), [24, 180, 36]
    assert split(ls.IIDPartitioner(3, sizes=sizes), labels).sizes.tolist() == sizes
    skewed = split(ls.DirichletPartitioner(3, alpha=1e-4, sizes=torch.tensor(sizes)), labels)
    assert skewed.sizes.tolist() == sizes
    assert len(labels[skewed[0]].unique()) <= 2  # 24 examples of a label, unless another client came first
    with pytest.raises(ValueError, match="`sizes` lists 2 clients; write num_clients=2, got 3"):
        ls.IIDPartitioner(3, sizes=[1.0, 2.0])
