"""Laws of designs by enumeration, and any spectra, for the tests of several designs."""

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

# zeros, ties, and fifteen decades
spectra = st.lists(
    st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0]), st.floats(-15, 0).map(lambda e: 10.0**e)),
    min_size=2,
    max_size=30,
)

# sizes, and how many of them are drawn one after another
SUCCESSIVE = [
    (np.array([1.0, 2, 3, 4, 5]), 2),
    (np.array([5.0, 1, 1, 1, 1, 1]), 3),
    (10.0 ** -np.arange(6), 3),
    (1e-10 ** np.arange(6), 3),
    (1 / np.arange(1, 8) ** 10.0, 3),
    (1 / np.arange(1, 7) ** 2.0, 5),
    (np.array([1.0, 2, 3, 1e-5]), 1),
    (np.array([1, 1, 1e-60, 1e-60, 1e-30, 1e-60]), 2),
    (np.array([1, 1, 1e-60, 1e-60, 1e-30, 1e-60]), 5),
    (np.ones(9), 4),
    (np.arange(1, 10) ** 4.0, 4),
]


def conditional_poisson_law(p: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """All samples of size n, as rows of 0 and 1, and their probabilities under Poisson sampling given the size."""
    rows = np.array([np.isin(range(len(p)), chosen) for chosen in itertools.combinations(range(len(p)), n)], float)
    probability = np.prod(np.where(rows == 1, p, 1 - p), axis=1)
    return rows, probability / probability.sum()


def successive_law(sizes: np.ndarray, n: int) -> dict[tuple[int, ...], float]:
    """Probability of each set: sum over the orders in which its terms can be drawn one by one."""
    law: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(sizes)), n):
        probability, left = 1.0, list(range(len(sizes)))
        for i in order:
            probability *= sizes[i] / sizes[left].sum()
            left.remove(i)
        law[tuple(sorted(order))] = law.get(tuple(sorted(order)), 0.0) + probability
    return law


def successive_joint(sizes: np.ndarray, n: int) -> np.ndarray:
    """Joint inclusion probabilities, those of single terms on the diagonal."""
    joint = np.zeros((len(sizes), len(sizes)))
    for terms, probability in successive_law(sizes, n).items():
        joint[np.ix_(terms, terms)] += probability
    return joint


def excess(draws: Any, law: Mapping[tuple[int, ...], Any]) -> float:
    """Largest deviation of a sample's frequency in units of what chance allows: 5 standard deviations and one draw."""
    counts, size = Counter(map(tuple, draws.tolist())), len(draws)
    assert counts.keys() <= law.keys()
    return max(
        abs(counts[terms] / size - float(p)) / (5 * float(p * (1 - p) / size) ** 0.5 + 1 / size)
        for terms, p in law.items()
    )
