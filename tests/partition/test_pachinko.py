"""Pachinko allocation: its law against the published procedure, one label at a time, and against theory."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betaln
from scipy.stats import betabinom

from lightning_spectral.partition import PachinkoPartitioner
from lightning_spectral.partition.by_class import draw_slot_classes
from lightning_spectral.partition.dirichlet import draw_class_counts, draw_dirichlet_counts, log_dirichlet
from lightning_spectral.partition.pachinko import TwoStages, two_stages

# Superclass 0 has classes 0, 2 and 4, superclass 1 the others; ten examples, of which seven are dealt, so that classes
# and whole superclasses run out nearly always.
SUPERCLASSES = np.array([0, 1, 0, 1, 0])
SUPPLY = np.array([1, 3, 1, 4, 1])
CLIENT_SIZES = np.array([4, 3])
ALPHA, BETA = 2.0, 3.0
Law = Callable[[np.ndarray, int, np.random.Generator], np.ndarray]


def law(symmetric: bool = False) -> TwoStages:
    return two_stages(SUPPLY, SUPERCLASSES, ALPHA, BETA, symmetric)


def one_of(weights: np.ndarray, rng: np.random.Generator) -> int:
    cumulative = weights.cumsum()
    return min(int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right")), int(weights.nonzero()[0][-1]))


def one_by_one(symmetric: bool) -> Law:
    """Reddi et al.'s procedure as a loop: two stages for each label; exhausted choices are removed from their stage."""
    sizes = np.bincount(SUPERCLASSES, SUPPLY)
    coarse = ALPHA * (np.ones(2) if symmetric else sizes / sizes.sum())
    fine = BETA * (np.ones(5) if symmetric else SUPPLY / sizes[SUPERCLASSES])

    def draw(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
        left, counts = left.copy(), np.zeros_like(left)
        of_superclass = rng.dirichlet(coarse)
        of_class = np.concatenate([rng.dirichlet(fine[s == SUPERCLASSES]) for s in (0, 1)])[[0, 3, 1, 4, 2]]
        for _ in range(num_draws):
            open_superclass = of_superclass * (np.bincount(SUPERCLASSES, left) > 0)
            chosen = one_of(open_superclass, rng)
            k = one_of(of_class * (left > 0) * (chosen == SUPERCLASSES), rng)
            left[k] -= 1
            counts[k] += 1
        return counts

    return draw


def renormalised_over_all_classes(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """A wrong way: the share of an exhausted class goes to the classes of all superclasses."""
    of_superclass, of_class = log_dirichlet(law().over_superclasses, rng), np.empty(5)
    of_superclass -= np.log(np.exp(of_superclass).sum())
    for own, prior in zip(law().members, law().over_classes, strict=True):
        logs = log_dirichlet(prior, rng)
        of_class[own] = logs - np.log(np.exp(logs).sum())
    return draw_class_counts(of_superclass[SUPERCLASSES] + of_class, left, num_draws, rng)


def flat(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Another wrong way: one prior over classes."""
    return draw_dirichlet_counts(ALPHA * SUPPLY / SUPPLY.sum(), left, num_draws, rng)


def moments(draw: Law, seed: int, num_samples: int = 2000) -> tuple[np.ndarray, np.ndarray]:
    """Means, with squared errors, of the counts of each client and class and of their products."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_samples):
        parts = np.split(draw_slot_classes(SUPPLY, CLIENT_SIZES, draw, rng), CLIENT_SIZES.cumsum()[:-1])
        counts = np.concatenate([np.bincount(part, minlength=len(SUPPLY)) for part in parts])
        rows.append(np.concatenate([counts, np.outer(counts, counts)[np.triu_indices(len(counts))]]))
    samples = np.array(rows, dtype=float)
    return samples.mean(0), samples.var(0) / num_samples


@cache
def published_moments(symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    return moments(one_by_one(symmetric), seed=2)


def deviation(draw: Law, symmetric: bool) -> float:
    """Largest difference of a moment from that of the loop, in standard errors."""
    fast, fast_error = moments(draw, seed=1)
    slow, slow_error = published_moments(symmetric)
    error = np.sqrt(fast_error + slow_error)
    assert (fast == slow)[error == 0].all()
    return float((np.abs(fast - slow)[error > 0] / error[error > 0]).max())


@pytest.mark.parametrize("symmetric", [False, True])
def test_counts_have_the_moments_of_the_published_procedure(symmetric: bool) -> None:
    assert deviation(law(symmetric), symmetric) <= 5.0


@pytest.mark.parametrize("wrong", [renormalised_over_all_classes, flat, law(symmetric=True)])
def test_the_check_of_moments_refuses_other_laws(wrong: Law) -> None:
    assert deviation(wrong, symmetric=False) > 8.0


@pytest.mark.parametrize(("symmetric", "expected"), [(False, 22.1), (True, 83.0)])
def test_a_client_of_cifar_100_sees_as_many_classes_as_theory_says(symmetric: bool, expected: float) -> None:
    # 20 superclasses of 5 classes, ample supply: of 500 labels k are of a given superclass, k beta-binomial, and a
    # class of it is absent from them with probability E (1 - q)^k
    a, b = (1.0, 10.0) if symmetric else (1.0 / 20, 10.0 / 5)
    k = np.arange(501)
    absent = betabinom.pmf(k, 500, a, 19 * a) @ np.exp(betaln(b, 4 * b + k) - betaln(b, 4 * b))
    assert 100 * (1 - absent) == pytest.approx(expected, abs=0.05)
    num_clients = 500
    plenty = np.full(100, 500 * num_clients)
    cifar = two_stages(plenty, np.arange(100) % 20, 1.0, 10.0, symmetric)
    slots = draw_slot_classes(plenty, np.full(num_clients, 500), cifar, np.random.default_rng(0))
    present = [len(np.unique(client)) for client in slots.reshape(num_clients, 500)]
    assert abs(np.mean(present) - 100 * (1 - absent)) <= 5.0 * np.std(present) / np.sqrt(num_clients)


def test_small_alpha_gives_a_client_one_superclass_with_all_its_classes() -> None:
    labels = torch.arange(6000) % 6
    superclasses = torch.tensor([4, 4, 9, 9, 9, 4])
    partitioner = PachinkoPartitioner(60, superclasses, alpha=1e-3, beta=1e6)
    partition = partitioner(6000, labels, torch.Generator().manual_seed(0))
    found = [labels[own].unique() for own in partition]
    # the last clients share what is left of both
    assert sum(len(classes) == 3 and len(superclasses[classes].unique()) == 1 for classes in found) >= 58


def test_a_data_set_without_some_of_the_classes_is_split() -> None:
    partitioner = PachinkoPartitioner(4, range(10), alpha=1.0, beta=1.0)
    partition = partitioner(40, 3 + 2 * (torch.arange(40) % 2), torch.Generator().manual_seed(0))
    assert partition.indices.sort().values.tolist() == list(range(40))


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    superclasses=st.lists(st.integers(-3, 3), min_size=6, max_size=6),
    share=st.floats(0.0, 1.0),
    log10_alpha=st.floats(-300.0, 12.0),
    log10_beta=st.floats(-300.0, 12.0),
    symmetric=st.booleans(),
)
def test_every_example_is_used_once_and_sizes_differ_by_at_most_one(
    labels: list[int],
    superclasses: list[int],
    share: float,
    log10_alpha: float,
    log10_beta: float,
    symmetric: bool,
) -> None:
    n = len(labels)
    num_clients = 1 + int(share * (n - 1))
    partitioner = PachinkoPartitioner(num_clients, superclasses, 10.0**log10_alpha, 10.0**log10_beta, symmetric)
    partition = partitioner(n, torch.tensor(labels), torch.Generator().manual_seed(0))
    assert sorted(partition.indices.tolist()) == list(range(n))
    assert int(partition.sizes.max() - partition.sizes.min()) == (1 if n % num_clients else 0)


@pytest.mark.parametrize(
    ("superclasses", "kind", "message"),
    [
        ([], ValueError, "`superclasses` must hold a whole number for each class, got none"),
        ("01", TypeError, "`superclasses` must be a sequence of whole numbers, one for each class, got '01'"),
        ({0: 1}, TypeError, "`superclasses` must be a sequence of whole numbers"),
        ([0, 1.5], TypeError, r"`superclasses\[1\]` must be a whole number, got 1.5"),
    ],
)
def test_impossible_superclasses_are_refused(superclasses: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PachinkoPartitioner(2, superclasses, alpha=1.0, beta=10.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 0, 1]])
def test_a_label_without_a_superclass_is_refused_when_it_splits(labels: list[int]) -> None:
    partitioner = PachinkoPartitioner(2, [0, 0], alpha=1.0, beta=10.0)
    with pytest.raises(ValueError, match=f"got 2 of them, but labels from {labels[0]} to {labels[-1]}"):
        partitioner(3, torch.tensor(labels), torch.Generator())
