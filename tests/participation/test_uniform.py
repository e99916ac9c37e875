"""Uniform cohorts: the law of the ordered sample, and its cost."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, check_resumes, same_state, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.participation import UniformParticipation

PROFILE = ls.simulation.DeviceProfile(1e6, 1e6, 1e9)


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


@settings(max_examples=50, deadline=None)
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
    assert UniformParticipation(30).cohort(100, torch.Generator().manual_seed(0)).untyped_storage().nbytes() == 30 * 8


def test_cohort_larger_than_the_federation_is_refused_early_and_late() -> None:
    participation = UniformParticipation(5)
    participation.check(5)
    for refuse in (participation.check, lambda n: participation.cohort(n, torch.Generator())):
        with pytest.raises(ValueError, match=r"at most num_clients=4, got 5; lower it or add clients"):
            refuse(4)


@pytest.mark.parametrize(
    ("share", "num_clients", "size"), [(0.1, 1, 1), (0.1, 14, 1), (0.1, 16, 2), (0.1, 10**12, 10**11), (0.999, 10, 10)]
)
def test_share_is_rounded_to_the_nearest_number_of_clients(share: float, num_clients: int, size: int) -> None:
    participation = UniformParticipation(share)
    participation.check(num_clients)
    assert participation.size(num_clients) == size


def test_share_trains_as_its_number_does_and_resumes(fit: Fit, data: ls.FederatedDataModule, tmp_path: Path) -> None:
    by_number = fit(seeded(LitMLP), data, clients_per_round=4, max_epochs=4)
    assert same_state(fit(seeded(LitMLP), data, clients_per_round=0.3, max_epochs=4).tensors, by_number.tensors)
    check_resumes(fit, LitMLP, data, tmp_path, clients_per_round=0.3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"filters": [ls.Robust(ls.Krum(1))]}, r"needs at least 4 clients a round, got clients_per_round=2"),
        ({"clock": ls.VirtualClock(PROFILE, keep_first=3)}, r"`keep_first=3` is more than clients_per_round=2"),
        ({"trainer": {"limit_train_batches": 0.1}}, r"limit_train_batches=0\.1 of 2 clients trains none"),
    ],
)
def test_what_a_share_is_too_small_for_is_refused_once_clients_are_counted(
    options: dict[str, Any], message: str, fit: Fit, data: ls.FederatedDataModule
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(seeded(LitMLP), data, clients_per_round=0.15, **options)
    fit(seeded(LitMLP), data, clients_per_round=0.9, **options)
