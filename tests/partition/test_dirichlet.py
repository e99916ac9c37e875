"""The Dirichlet split: its law against draws of one label at a time, its counts against exact probabilities."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import betaln

from lightning_spectral.partition import DirichletPartitioner, report
from lightning_spectral.partition.base import equal_shares
from lightning_spectral.partition.by_class import draw_slot_classes
from lightning_spectral.partition.dirichlet import draw_class_counts, draw_dirichlet_counts, log_dirichlet

SUPPLY = np.array([3, 2, 4, 1])  # ten examples, so the seven slots below exhaust classes nearly always
PRIOR = np.array([0.6, 0.25, 0.1, 0.05])
CLIENT_SIZES = np.array([4, 3])
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


def batched_slots(
    class_sizes: np.ndarray, client_sizes: np.ndarray, concentration: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The slots as the partitioner draws them."""
    return draw_slot_classes(class_sizes, client_sizes, partial(draw_dirichlet_counts, concentration), rng)


def literal_slots(
    class_sizes: np.ndarray, client_sizes: np.ndarray, concentration: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Hsu et al.'s procedure as a loop: a prior per client, then label by label without replacement."""
    left, slots = class_sizes.copy(), []
    for size in client_sizes:
        prior = rng.dirichlet(concentration)
        for _ in range(size):
            live = np.where(left > 0, prior, 0.0)
            cumulative = (live / live.sum()).cumsum()
            label = min(int(cumulative.searchsorted(rng.random(), side="right")), int(np.flatnonzero(live)[-1]))
            left[label] -= 1
            slots.append(label)
    return np.array(slots)


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


def count_law_deviation(draw: Callable[..., np.ndarray], num_samples: int = 20_000) -> float:
    """Largest deviation of a count vector's frequency from its probability, in its own standard errors."""
    law = exact_count_law(PRIOR, SUPPLY, 7)
    rng = np.random.default_rng(0)
    seen = Counter(tuple(map(int, draw(np.log(PRIOR), SUPPLY, 7, rng))) for _ in range(num_samples))
    assert seen.keys() <= law.keys()
    return max(abs(seen[counts] / num_samples - p) / math.sqrt(p * (1 - p) / num_samples) for counts, p in law.items())


def moments(draw_slots: Callable[..., np.ndarray], num_samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Means, with squared errors, of the counts of each client and class and of their products."""
    rng = np.random.default_rng(seed)
    ends, rows = CLIENT_SIZES.cumsum()[:-1], []
    for _ in range(num_samples):
        parts = np.split(draw_slots(SUPPLY, CLIENT_SIZES, CONCENTRATION, rng), ends)
        counts = np.concatenate([np.bincount(part, minlength=len(SUPPLY)) for part in parts])
        rows.append(np.concatenate([counts, np.outer(counts, counts)[np.triu_indices(len(counts))]]))
    samples = np.array(rows, dtype=float)
    return samples.mean(0), samples.var(0) / num_samples


def test_exact_law_oracle_is_a_distribution_over_feasible_counts() -> None:
    law = exact_count_law(PRIOR, SUPPLY, 7)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    feasible = itertools.product(*(range(n + 1) for n in SUPPLY))
    assert set(law) == {counts for counts in feasible if sum(counts) == 7}


def test_batched_counts_follow_the_exact_one_by_one_law() -> None:
    assert count_law_deviation(draw_class_counts) <= 5.0


@pytest.mark.parametrize("wrong", [leftover_from_proportions, redraw_from_scratch])
def test_count_law_check_refuses_plausible_shortcuts(wrong: Callable[..., np.ndarray]) -> None:
    assert count_law_deviation(wrong) > 20.0


def test_slots_have_the_moments_of_the_literal_split() -> None:
    fast, fast_error = moments(batched_slots, 6000, seed=1)
    slow, slow_error = moments(literal_slots, 6000, seed=2)
    assert (np.abs(fast - slow) <= 5.0 * np.sqrt(fast_error + slow_error)).all()


def test_moment_check_refuses_filling_up_from_the_overall_proportions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lightning_spectral.partition.dirichlet.draw_class_counts", leftover_from_proportions)
    wrong, wrong_error = moments(batched_slots, 6000, seed=1)
    slow, slow_error = moments(literal_slots, 6000, seed=2)
    assert not (np.abs(wrong - slow) <= 5.0 * np.sqrt(wrong_error + slow_error)).all()


def classes_present(slots: np.ndarray, size: int) -> float:
    return float(np.mean([len(set(client)) for client in slots.reshape(-1, size).tolist()]))


def test_whole_split_shows_as_many_classes_per_client_as_the_literal_split() -> None:
    labels, client_sizes, num_splits = torch.arange(2000) % 10, np.full(20, 100), 60
    concentration = np.full(10, 0.1)
    ours, literal = [], []
    for seed in range(num_splits):
        partition = DirichletPartitioner(20, alpha=1.0)(2000, labels, torch.Generator().manual_seed(seed))
        ours.append(report(partition, labels).mean_classes())
        slots = literal_slots(np.full(10, 200), client_sizes, concentration, np.random.default_rng(seed))
        literal.append(classes_present(slots, 100))
    error = np.sqrt((np.var(ours) + np.var(literal)) / num_splits)
    assert abs(np.mean(ours) - np.mean(literal)) <= 5.0 * error


@pytest.mark.parametrize(("per_class", "expected"), [(0.1, 4.97), (1.0, 9.82)], ids=["alpha p", "symmetric"])
def test_cifar_like_client_shows_the_number_of_classes_theory_says(per_class: float, expected: float) -> None:
    # 500 labels of ten equal classes with ample supply: a class is absent with probability E (1 - q)^500
    absent = np.exp(betaln(per_class, 9 * per_class + 500) - betaln(per_class, 9 * per_class))
    theory = 10 * (1 - absent)
    assert theory == pytest.approx(expected, abs=0.005)
    rng, num_clients = np.random.default_rng(0), 4000
    concentration = np.full(10, per_class)
    slots = batched_slots(np.full(10, 500 * num_clients), np.full(num_clients, 500), concentration, rng).reshape(
        num_clients, 500
    )
    present = [len(np.unique(client)) for client in slots]
    assert abs(np.mean(present) - theory) <= 5.0 * np.std(present) / np.sqrt(num_clients)


def test_both_conventions_name_the_same_split_for_equal_classes() -> None:
    labels = torch.arange(1000) % 10
    of_proportions = DirichletPartitioner(20, alpha=1.0)(1000, labels, torch.Generator().manual_seed(0))
    per_class = DirichletPartitioner(20, 0.1, symmetric=True)(1000, labels, torch.Generator().manual_seed(0))
    other = DirichletPartitioner(20, 1.0, symmetric=True)(1000, labels, torch.Generator().manual_seed(0))
    assert of_proportions.fingerprint() == per_class.fingerprint()
    assert of_proportions.fingerprint() != other.fingerprint()


@pytest.mark.parametrize(("symmetric", "mean"), [(False, 0.1), (True, 0.5)])
def test_prior_of_an_unequal_data_set_is_centred_as_the_convention_says(symmetric: bool, mean: float) -> None:
    # ten clients of one example each: the first served draws its label from a fresh prior, with all classes live
    labels = (torch.arange(10) == 0).long()
    partitioner, num_seeds = DirichletPartitioner(10, 1.0, symmetric), 3000
    rare_first = []
    for seed in range(num_seeds):
        generator = torch.Generator().manual_seed(seed)
        order, _ = equal_shares(10, 10, torch.Generator().manual_seed(seed))
        rare_first.append(int(labels[partitioner(10, labels, generator)[int(order[0])]]))
    assert abs(np.mean(rare_first) - mean) <= 5.0 * np.sqrt(mean * (1 - mean) / num_seeds)


@pytest.mark.parametrize("concentration", [[0.5, 1.5, 3.0], [0.05, 0.2, 0.1]])
def test_log_dirichlet_has_the_moments_of_the_dirichlet(concentration: list[float]) -> None:
    a, rng, num_samples = np.array(concentration), np.random.default_rng(0), 20_000
    logs = np.array([log_dirichlet(a, rng) for _ in range(num_samples)])
    shares = np.exp(logs - logs.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    total, mean = a.sum(), a / a.sum()
    second = (mean * (1 - mean)) / (total + 1) + mean**2
    for power, truth in ((1, mean), (2, second)):
        values = shares**power
        assert (np.abs(values.mean(0) - truth) <= 5.0 * values.std(0) / np.sqrt(num_samples)).all()


def test_log_dirichlet_of_tiny_concentration_puts_its_mass_on_a_class_drawn_from_the_proportions() -> None:
    proportions, rng, num_samples = np.array([0.7, 0.2, 0.1]), np.random.default_rng(0), 10_000
    logs = np.array([log_dirichlet(1e-6 * proportions, rng) for _ in range(num_samples)])
    assert np.isfinite(logs).all()
    frequency = np.bincount(logs.argmax(1), minlength=3) / num_samples
    assert (np.abs(frequency - proportions) <= 5.0 * np.sqrt(proportions * (1 - proportions) / num_samples)).all()


def test_prior_without_mass_on_live_classes_draws_uniformly_from_what_is_left() -> None:
    log_prior, supply = np.array([0.0, -np.inf, -np.inf]), np.array([1, 2, 6])
    rng = np.random.default_rng(0)
    counts = np.array([draw_class_counts(log_prior, supply, 4, rng) for _ in range(5000)])
    assert (counts[:, 0] == 1).all()
    # three of the eight left, hypergeometric: mean 3/4 of class 1, variance 3 (1/4) (3/4) (5/7)
    error = np.sqrt(3 * (1 / 4) * (3 / 4) * (5 / 7) / 5000)
    assert abs(counts[:, 1].mean() - 3 / 4) <= 5.0 * error


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(-2, 4), min_size=1, max_size=60),
    share=st.floats(0.0, 1.0),
    log10_alpha=st.floats(-300.0, 12.0),
    symmetric=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_every_example_is_used_once_and_sizes_differ_by_at_most_one(
    labels: list[int], share: float, log10_alpha: float, symmetric: bool, seed: int
) -> None:
    n = len(labels)
    num_clients = 1 + int(share * (n - 1))
    partitioner = DirichletPartitioner(num_clients, 10.0**log10_alpha, symmetric)
    partition = partitioner(n, torch.tensor(labels), torch.Generator().manual_seed(seed))
    assert sorted(partition.indices.tolist()) == list(range(n))
    expected = [n // num_clients] * (num_clients - n % num_clients) + [n // num_clients + 1] * (n % num_clients)
    assert sorted(partition.sizes.tolist()) == expected


@pytest.mark.parametrize("alpha", [1e-300, 0.01, 1e12])
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
        for seed in range(900)
    ]
    assert abs(np.mean(first_is_bigger) - 1 / 3) <= 5.0 * np.sqrt(2 / 9 / 900)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_alpha_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="`alpha` must be positive and finite"):
        DirichletPartitioner(2, alpha)


def test_no_clients_are_refused() -> None:
    with pytest.raises(ValueError, match="`num_clients` must be at least 1, got 0"):
        DirichletPartitioner(0, 1.0)
