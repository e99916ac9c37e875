"""Laws of how many examples of each class a client gets, compared by the moments of small splits."""

from collections.abc import Callable

import numpy as np

from lightning_spectral.partition.dirichlet import CountLaw, draw_slot_classes

CLIENT_SIZES = np.array([4, 3])  # seven of ten examples, so that classes run out nearly always
Moments = tuple[np.ndarray, np.ndarray]


def moments(draw: CountLaw, supply: np.ndarray, seed: int, num_samples: int = 2000) -> Moments:
    """Means, with squared errors, of the counts of each client and class and of their products."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(num_samples):
        parts = np.split(draw_slot_classes(supply, CLIENT_SIZES, draw, rng), CLIENT_SIZES.cumsum()[:-1])
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
    slots = draw_slot_classes(supply, np.full(num_clients, 500), draw, np.random.default_rng(0))
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
