"""Uniform cohorts: the law of the ordered sample, and its cost."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spectral.participation import UniformParticipation


def deviation(draw: Callable[[int, torch.Generator], Tensor], num_clients: int, size: int) -> float:
    """Largest deviation of the frequency of an ordered cohort from uniform, in standard errors."""
    generator, num_samples = torch.Generator().manual_seed(0), 10_000
    seen = Counter(tuple(draw(num_clients, generator).tolist()) for _ in range(num_samples))
    cohorts = list(itertools.permutations(range(num_clients), size))
    assert seen.keys() <= set(cohorts)
    p = 1 / len(cohorts)
    error = math.sqrt(p * (1 - p) / num_samples)
    return max(abs(seen[cohort] / num_samples - p) / error for cohort in cohorts)


@pytest.mark.parametrize(("num_clients", "size"), [(4, 4), (4, 2), (9, 2), (13, 2)])
def test_every_ordered_cohort_is_equally_likely(num_clients: int, size: int) -> None:
    assert deviation(UniformParticipation(size).cohort, num_clients, size) <= 5.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda n, generator: UniformParticipation(2).cohort(n, generator).sort().values,
        lambda n, generator: (torch.randint(n, (1,), generator=generator) + torch.arange(2)) % n,  # neighbours
    ],
)
def test_other_laws_are_noticed(wrong: Callable[[int, torch.Generator], Tensor]) -> None:
    assert deviation(wrong, 9, 2) > 10.0


@settings(max_examples=100, deadline=None)
@given(num_clients=st.integers(1, 300), share=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_cohort_is_distinct_ids_in_range_and_fixed_by_the_generator(num_clients: int, share: float, seed: int) -> None:
    size = 1 + int(share * (num_clients - 1))
    first, again = (
        UniformParticipation(size).cohort(num_clients, torch.Generator().manual_seed(seed)) for _ in range(2)
    )
    assert torch.equal(first, again)
    assert first.dtype == torch.int64
    assert len(set(first.tolist())) == len(first) == size
    assert 0 <= int(first.min()) <= int(first.max()) < num_clients


def test_small_cohort_of_a_huge_federation_costs_one_draw_per_id() -> None:
    # a permutation of 10^15 clients would not fit in memory; the generator advances as for k plain draws
    generator, plain = (torch.Generator().manual_seed(3) for _ in range(2))
    cohort = UniformParticipation(100).cohort(10**15, generator)
    assert torch.equal(cohort, torch.randint(10**15, (100,), generator=plain))
    assert torch.equal(generator.get_state(), plain.get_state())


def test_cohort_leaves_the_global_generators_alone() -> None:
    before = random.getstate(), torch.get_rng_state()
    for num_clients in (3, 1000):
        UniformParticipation(3).cohort(num_clients, torch.Generator().manual_seed(0))
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_whole_permutation_is_not_kept_alive_by_the_cohort() -> None:
    cohort = UniformParticipation(30).cohort(100, torch.Generator().manual_seed(0))
    assert cohort.untyped_storage().nbytes() == 30 * 8


@pytest.mark.parametrize("size", [0, -1])
def test_empty_cohort_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"`clients_per_round` must be in \[1, 1048576\], got"):
        UniformParticipation(size)


def test_cohort_larger_than_the_federation_is_refused_early_and_late() -> None:
    participation = UniformParticipation(5)
    participation.check(5)
    for refuse in (participation.check, lambda n: participation.cohort(n, torch.Generator())):
        with pytest.raises(ValueError, match=r"at most num_clients=4, got 5; lower it or add clients"):
            refuse(4)
