"""Pachinko allocation: its law against the published procedure, one label at a time, and against theory."""

import numpy as np
import pytest
import torch
from class_counts import deviation, mean_classes_present, moments, one_by_one, one_of
from scipy.special import betaln
from scipy.stats import betabinom

from lightning_spectral.partition import PachinkoPartitioner
from lightning_spectral.partition.dirichlet import (
    CountLaw,
    class_concentration,
    draw_class_counts,
    draw_dirichlet_counts,
    log_dirichlet,
    two_stages,
)

# Superclass 0 has classes 0, 2 and 4, superclass 1 the others; both run out often.
SUPERCLASSES = np.array([0, 1, 0, 1, 0])
SUPPLY = np.array([1, 3, 1, 4, 1])
ALPHA, BETA = 2.0, 3.0


def law(symmetric: bool = False) -> CountLaw:
    return two_stages(SUPPLY, SUPERCLASSES, ALPHA, BETA, symmetric)


def published(symmetric: bool) -> CountLaw:
    """Reddi et al.'s procedure as a loop: two stages for each label; exhausted choices are removed from their stage."""
    sizes = np.bincount(SUPERCLASSES, SUPPLY)
    coarse = ALPHA * (np.ones(2) if symmetric else sizes / sizes.sum())
    fine = BETA * (np.ones(5) if symmetric else SUPPLY / sizes[SUPERCLASSES])

    def draw(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
        of_superclass = rng.dirichlet(coarse)
        of_class = np.concatenate([rng.dirichlet(fine[s == SUPERCLASSES]) for s in (0, 1)])[[0, 3, 1, 4, 2]]

        def draw_class(left: np.ndarray) -> int:
            chosen = one_of(of_superclass * (np.bincount(SUPERCLASSES, left) > 0), rng)
            return one_of(of_class * (left > 0) * (chosen == SUPERCLASSES), rng)

        return one_by_one(num_draws, left, draw_class)

    return draw


def renormalised_over_all_classes(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """A wrong way: the share of an exhausted class goes to the classes of all superclasses."""
    sizes = np.bincount(SUPERCLASSES, SUPPLY)
    of_superclass, of_class = log_dirichlet(class_concentration(sizes, ALPHA, symmetric=False), rng), np.empty(5)
    of_superclass -= np.log(np.exp(of_superclass).sum())
    for own in (np.flatnonzero(s == SUPERCLASSES) for s in (0, 1)):
        logs = log_dirichlet(class_concentration(SUPPLY[own], BETA, symmetric=False), rng)
        of_class[own] = logs - np.log(np.exp(logs).sum())
    return draw_class_counts(of_superclass[SUPERCLASSES] + of_class, left, num_draws, rng)


def flat(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Another wrong way: one prior over classes."""
    return draw_dirichlet_counts(ALPHA * SUPPLY / SUPPLY.sum(), left, num_draws, rng)


@pytest.mark.parametrize("symmetric", [False, True])
def test_counts_have_the_moments_of_the_published_procedure(symmetric: bool) -> None:
    assert deviation(moments(law(symmetric), SUPPLY, seed=1), moments(published(symmetric), SUPPLY, seed=2)) <= 5.0


def test_other_laws_are_noticed() -> None:
    expected = moments(published(symmetric=False), SUPPLY, seed=2)
    for wrong in (renormalised_over_all_classes, flat, law(symmetric=True)):
        assert deviation(moments(wrong, SUPPLY, seed=1), expected) > 8.0


@pytest.mark.parametrize(("symmetric", "expected"), [(False, 22.1), (True, 83.0)])
def test_a_client_of_cifar_100_sees_as_many_classes_as_theory_says(symmetric: bool, expected: float) -> None:
    # 20 superclasses of 5 classes, ample supply: of 500 labels k are of a given superclass, k beta-binomial, and a
    # class of it is absent from them with probability E (1 - q)^k
    a, b = (1.0, 10.0) if symmetric else (1.0 / 20, 10.0 / 5)
    k = np.arange(501)
    absent = betabinom.pmf(k, 500, a, 19 * a) @ np.exp(betaln(b, 4 * b + k) - betaln(b, 4 * b))
    assert 100 * (1 - absent) == pytest.approx(expected, abs=0.05)
    plenty = np.full(100, 10**6)
    cifar = two_stages(plenty, np.arange(100) % 20, 1.0, 10.0, symmetric)
    mean, error = mean_classes_present(cifar, plenty, num_clients=300)
    assert abs(mean - 100 * (1 - absent)) <= 5.0 * error


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
