"""Dirichlet and Pachinko splits: their laws against draws of one label at a time, and against theory."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from scipy.special import betaln
from scipy.stats import betabinom

from lightning_spectral.partition import DirichletPartitioner, PachinkoPartitioner, dirichlet, report
from lightning_spectral.partition.dirichlet import (
    CountLaw,
    SlotLaw,
    class_concentration,
    draw_class_counts,
    draw_dirichlet_counts,
    draw_dirichlet_slots,
    draw_slot_classes,
    log_dirichlet,
    two_stages,
)
from lightning_spectral.partition.sizes import client_shares

CLIENT_SIZES = np.array([4, 3])  # seven of ten examples, so that classes run out nearly always
Moments = tuple[np.ndarray, np.ndarray]


def moments(draw: CountLaw, supply: np.ndarray, seed: int, num_samples: int = 2000) -> Moments:
    """Means, with squared errors, of the counts of each client and class and of their products."""
    return slot_moments(partial(draw_slot_classes, draw), supply, seed, num_samples)


def slot_moments(draw_slots: SlotLaw, supply: np.ndarray, seed: int, num_samples: int = 2000) -> Moments:
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_samples):
        parts = np.split(draw_slots(supply, CLIENT_SIZES, rng), CLIENT_SIZES.cumsum()[:-1])
        counts = np.concatenate([np.bincount(part, minlength=len(supply)) for part in parts])
        rows.append(np.concatenate([counts, np.outer(counts, counts)[np.triu_indices(len(counts))]]))
    samples = np.array(rows, dtype=float)
    return samples.mean(0), samples.var(0) / num_samples


def deviation(one: Moments, other: Moments) -> float:
    """Largest difference of a moment, in standard errors."""
    difference, error = np.abs(one[0] - other[0]), np.sqrt(one[1] + other[1])
    assert (difference[error == 0] == 0).all()
    return float((difference[error > 0] / error[error > 0]).max())


def mean_classes_present(draw: CountLaw, supply: np.ndarray, num_clients: int) -> tuple[float, float]:
    """How many classes a client of 500 examples has on average, with its standard error."""
    slots = draw_slot_classes(draw, supply, np.full(num_clients, 500), np.random.default_rng(0))
    present = [len(np.unique(client)) for client in slots.reshape(num_clients, 500)]
    return float(np.mean(present)), float(np.std(present) / np.sqrt(num_clients))


def one_of(weights: np.ndarray, rng: np.random.Generator) -> int:
    """An index, drawn in proportion to the weights."""
    cumulative = weights.cumsum()
    return min(int(cumulative.searchsorted(rng.random() * cumulative[-1], side="right")), int(weights.nonzero()[0][-1]))


def one_by_one(num_draws: int, left: np.ndarray, draw_class: Callable[[np.ndarray], int]) -> np.ndarray:
    """Counts of classes that are drawn one after another, each given what is left."""
    left, counts = left.copy(), np.zeros_like(left)
    for _ in range(num_draws):
        k = draw_class(left)
        left[k] -= 1
        counts[k] += 1
    return counts


SUPPLY = np.array([3, 2, 4, 1])
PRIOR = np.array([0.6, 0.25, 0.1, 0.05])
CONCENTRATION = 2.0 * SUPPLY / SUPPLY.sum()


def exact_count_law(prior: np.ndarray, supply: np.ndarray, num_draws: int) -> dict[tuple[int, ...], float]:
    """Probability of every count vector, computed one label at a time."""
    law = {tuple(0 for _ in supply): 1.0}
    for _ in range(num_draws):
        following: dict[tuple[int, ...], float] = defaultdict(float)
        for counts, probability in law.items():
            live = prior * (np.array(counts) < supply)
            for k in np.flatnonzero(live):
                after = tuple(c + (i == k) for i, c in enumerate(counts))
                following[after] += probability * live[k] / live.sum()
        law = following
    return law


def leftover_from_proportions(
    log_prior: np.ndarray, supply: np.ndarray, num_draws: int, rng: np.random.Generator
) -> np.ndarray:
    """A wrong way: the shortfall is drawn from the remaining examples, ignoring the prior."""
    prior = np.exp(log_prior - log_prior.max())
    counts = np.minimum(rng.multinomial(num_draws, prior / prior.sum()), supply)
    return np.asarray(counts + rng.multivariate_hypergeometric(supply - counts, num_draws - counts.sum()))


def redraw_from_scratch(
    log_prior: np.ndarray, supply: np.ndarray, num_draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Another wrong way: redraw all labels until they happen to fit."""
    prior = np.exp(log_prior - log_prior.max())
    while True:
        counts = rng.multinomial(num_draws, prior / prior.sum())
        if (counts <= supply).all():
            return np.asarray(counts)


def count_law_deviation(draw: Callable[..., np.ndarray], num_samples: int = 4_000) -> float:
    """Largest deviation of a count vector's frequency from its probability, in its own standard errors."""
    law = exact_count_law(PRIOR, SUPPLY, 7)
    rng = np.random.default_rng(0)
    seen = Counter(tuple(map(int, draw(np.log(PRIOR), SUPPLY, 7, rng))) for _ in range(num_samples))
    assert seen.keys() <= law.keys()
    return max(abs(seen[counts] / num_samples - p) / math.sqrt(p * (1 - p) / num_samples) for counts, p in law.items())


def literal(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Hsu et al.'s procedure as a loop: a prior per client, then label by label without replacement."""
    prior = rng.dirichlet(CONCENTRATION)
    return one_by_one(num_draws, left, lambda left: one_of(np.where(left > 0, prior, 0.0), rng))


def test_batched_counts_follow_the_exact_one_by_one_law() -> None:
    assert count_law_deviation(draw_class_counts) <= 5.0


def test_counts_have_the_moments_of_the_literal_split() -> None:
    ours = moments(partial(draw_dirichlet_counts, CONCENTRATION), SUPPLY, seed=1)
    assert deviation(ours, moments(literal, SUPPLY, seed=2)) <= 5.0


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 2])
def test_blocks_of_clients_have_the_moments_of_the_literal_split(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dirichlet, "BLOCK", block)
    ours = slot_moments(partial(draw_dirichlet_slots, CONCENTRATION), SUPPLY, seed=1, num_samples=10_000)
    assert deviation(ours, moments(literal, SUPPLY, seed=2, num_samples=10_000)) <= 5.0


@pytest.mark.slow
def test_a_million_clients_are_dealt_in_seconds_and_every_example_once() -> None:
    labels = torch.arange(1_500_000) % 10
    began = time.process_time()
    partition = DirichletPartitioner(1_000_000, 0.5)(len(labels), labels, torch.Generator().manual_seed(0))
    assert time.process_time() - began < 20.0  # five where this was written; one by one takes a minute and a half
    assert torch.equal(partition.indices.sort().values, torch.arange(len(labels)))
    assert partition.sizes.unique().tolist() == [1, 2]


@pytest.mark.slow
def test_blocks_that_draw_what_is_missing_from_another_prior_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: only the client's own prior is right for labels that were skipped."""
    monkeypatch.setattr(
        dirichlet, "draw_class_counts", lambda _, *rest: draw_class_counts(np.zeros(len(rest[0])), *rest)
    )
    wrong = slot_moments(partial(draw_dirichlet_slots, CONCENTRATION), SUPPLY, seed=1, num_samples=10_000)
    assert deviation(wrong, moments(literal, SUPPLY, seed=2, num_samples=10_000)) > 8.0


@pytest.mark.parametrize(("per_class", "expected"), [(0.1, 4.97), (1.0, 9.82)], ids=["alpha p", "symmetric"])
def test_cifar_like_client_shows_the_number_of_classes_theory_says(per_class: float, expected: float) -> None:
    # 500 labels of ten equal classes with ample supply: a class is absent with probability E (1 - q)^500
    theory = 10 * (1 - np.exp(betaln(per_class, 9 * per_class + 500) - betaln(per_class, 9 * per_class)))
    assert theory == pytest.approx(expected, abs=0.005)
    law = partial(draw_dirichlet_counts, np.full(10, per_class))
    mean, error = mean_classes_present(law, np.full(10, 10**6), num_clients=1000)
    assert abs(mean - theory) <= 5.0 * error


@pytest.mark.parametrize("wrong", [leftover_from_proportions, redraw_from_scratch])
def test_count_law_check_refuses_plausible_shortcuts(wrong: Callable[..., np.ndarray]) -> None:
    assert count_law_deviation(wrong) > 20.0


def test_both_conventions_name_the_same_split_for_equal_classes() -> None:
    labels = torch.arange(1000) % 10
    of_proportions = DirichletPartitioner(20, alpha=1.0)(1000, labels, torch.Generator().manual_seed(0))
    per_class = DirichletPartitioner(20, 0.1, symmetric=True)(1000, labels, torch.Generator().manual_seed(0))
    other = DirichletPartitioner(20, 1.0, symmetric=True)(1000, labels, torch.Generator().manual_seed(0))
    assert of_proportions.fingerprint == per_class.fingerprint
    assert of_proportions.fingerprint != other.fingerprint


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("symmetric", "mean"), [(False, 0.1), (True, 0.5)])
def test_prior_of_an_unequal_data_set_is_centred_as_the_convention_says(symmetric: bool, mean: float) -> None:
    # ten clients of one example each: the first served draws its label from a fresh prior, with all classes live
    labels = (torch.arange(10) == 0).long()
    partitioner, num_seeds = DirichletPartitioner(10, 1.0, symmetric), 200
    rare_first = []
    for seed in range(num_seeds):
        generator = torch.Generator().manual_seed(seed)
        order, _ = client_shares(None, 10, 10, torch.Generator().manual_seed(seed))
        rare_first.append(int(labels[partitioner(10, labels, generator)[int(order[0])]]))
    assert abs(np.mean(rare_first) - mean) <= 5.0 * np.sqrt(mean * (1 - mean) / num_seeds)


@pytest.mark.parametrize("concentration", [[0.5, 1.5, 3.0], [0.05, 0.2, 0.1]])
def test_log_dirichlet_has_the_moments_of_the_dirichlet(concentration: list[float]) -> None:
    a, rng, num_samples = np.array(concentration), np.random.default_rng(0), 5000
    logs = np.array([log_dirichlet(a, rng) for _ in range(num_samples)])
    shares = np.exp(logs - logs.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    total, mean = a.sum(), a / a.sum()
    second = (mean * (1 - mean)) / (total + 1) + mean**2
    for power, truth in ((1, mean), (2, second)):
        values = shares**power
        assert (np.abs(values.mean(0) - truth) <= 5.0 * values.std(0) / np.sqrt(num_samples)).all()


def test_log_dirichlet_of_tiny_concentration_puts_its_mass_on_a_class_drawn_from_the_proportions() -> None:
    proportions, rng, num_samples = np.array([0.7, 0.2, 0.1]), np.random.default_rng(0), 2000
    logs = np.array([log_dirichlet(1e-6 * proportions, rng) for _ in range(num_samples)])
    assert np.isfinite(logs).all()
    frequency = np.bincount(logs.argmax(1), minlength=3) / num_samples
    assert (np.abs(frequency - proportions) <= 5.0 * np.sqrt(proportions * (1 - proportions) / num_samples)).all()


def test_prior_without_mass_on_live_classes_draws_uniformly_from_what_is_left() -> None:
    log_prior, supply = np.array([0.0, -np.inf, -np.inf]), np.array([1, 2, 6])
    rng = np.random.default_rng(0)
    counts = np.array([draw_class_counts(log_prior, supply, 4, rng) for _ in range(2000)])
    assert (counts[:, 0] == 1).all()
    # three of the eight left, hypergeometric: mean 3/4 of class 1, variance 3 (1/4) (3/4) (5/7)
    error = np.sqrt(3 * (1 / 4) * (3 / 4) * (5 / 7) / 2000)
    assert abs(counts[:, 1].mean() - 3 / 4) <= 5.0 * error


@pytest.mark.parametrize("alpha", [1e-300, 1e12])
def test_extreme_concentrations_of_many_clients_stay_exact(alpha: float) -> None:
    labels = torch.arange(6000) % 100
    partition = DirichletPartitioner(1000, alpha)(6000, labels, torch.Generator().manual_seed(0))
    assert torch.equal(partition.indices.sort().values, torch.arange(6000))
    assert (partition.sizes == 6).all()


def test_small_alpha_separates_classes_and_large_alpha_mixes_them() -> None:
    labels = torch.arange(5000) % 10
    split = partial(DirichletPartitioner, 10)
    means = [
        report(split(alpha)(5000, labels, torch.Generator().manual_seed(0)), labels).mean_classes()
        for alpha in (1e-3, 1e6)
    ]
    assert means[0] < 3
    assert means[1] >= 9.5  # not 10: the clients served last find some classes exhausted


def test_every_client_gets_the_larger_share_equally_often() -> None:
    labels = torch.arange(40) % 2
    first_is_bigger = [
        int(DirichletPartitioner(3, 1.0)(40, labels, torch.Generator().manual_seed(seed)).sizes[0] == 14)
        for seed in range(400)
    ]
    assert abs(np.mean(first_is_bigger) - 1 / 3) <= 5.0 * np.sqrt(2 / 9 / 400)


# Superclass 0 has classes 0, 2 and 4, superclass 1 the others; both run out often.
SUPERCLASSES = np.array([0, 1, 0, 1, 0])
IN_TWO = np.array([1, 3, 1, 4, 1])
ALPHA, BETA = 2.0, 3.0


def law(symmetric: bool = False) -> CountLaw:
    return two_stages(IN_TWO, SUPERCLASSES, ALPHA, BETA, symmetric)


def published(symmetric: bool) -> CountLaw:
    """Reddi et al.'s procedure as a loop: two stages for each label; exhausted choices are removed from their stage."""
    sizes = np.bincount(SUPERCLASSES, IN_TWO)
    coarse = ALPHA * (np.ones(2) if symmetric else sizes / sizes.sum())
    fine = BETA * (np.ones(5) if symmetric else IN_TWO / sizes[SUPERCLASSES])

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
    sizes = np.bincount(SUPERCLASSES, IN_TWO)
    of_superclass, of_class = log_dirichlet(class_concentration(sizes, ALPHA, symmetric=False), rng), np.empty(5)
    of_superclass -= np.log(np.exp(of_superclass).sum())
    for own in (np.flatnonzero(s == SUPERCLASSES) for s in (0, 1)):
        logs = log_dirichlet(class_concentration(IN_TWO[own], BETA, symmetric=False), rng)
        of_class[own] = logs - np.log(np.exp(logs).sum())
    return draw_class_counts(of_superclass[SUPERCLASSES] + of_class, left, num_draws, rng)


def flat(left: np.ndarray, num_draws: int, rng: np.random.Generator) -> np.ndarray:
    """Another wrong way: one prior over classes."""
    return draw_dirichlet_counts(ALPHA * IN_TWO / IN_TWO.sum(), left, num_draws, rng)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [False, True])
def test_counts_have_the_moments_of_the_published_procedure(symmetric: bool) -> None:
    assert deviation(moments(law(symmetric), IN_TWO, seed=1), moments(published(symmetric), IN_TWO, seed=2)) <= 5.0


@pytest.mark.slow
def test_other_laws_are_noticed() -> None:
    expected = moments(published(symmetric=False), IN_TWO, seed=2)
    for wrong in (renormalised_over_all_classes, flat, law(symmetric=True)):
        assert deviation(moments(wrong, IN_TWO, seed=1), expected) > 8.0


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


@pytest.mark.parametrize("labels", [[0, 1, 2], [-1, 0, 1]])
def test_a_label_without_a_superclass_is_refused_when_it_splits(labels: list[int]) -> None:
    partitioner = PachinkoPartitioner(2, [0, 0], alpha=1.0, beta=10.0)
    with pytest.raises(ValueError, match=f"got 2 of them, but labels from {labels[0]} to {labels[-1]}"):
        partitioner(3, torch.tensor(labels), torch.Generator())
