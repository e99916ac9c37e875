"""Results of the paper about random influence matrices, with its errata corrected."""

from __future__ import annotations

import math

from scipy.stats import binom


def expected_empty_columns(num_rows: int, num_columns: int, degree: int) -> float:
    r"""Expected number of columns without an entry, :math:`n (1 - d/n)^m`: their probabilities have no effect.

    The formula of Lemma 2.3 is printed as a distribution, but is the expected number of k-subsets of empty columns; for
    k = 1 it is this one.

    Example:
        >>> round(expected_empty_columns(1000, 1000, degree=1)), round(expected_empty_columns(1000, 1000, degree=5))
        (368, 7)
    """
    return num_columns * (1 - degree / num_columns) ** num_rows


def expected_empty_subsets(num_rows: int, num_columns: int, degree: int, size: int) -> float:
    r"""Expected number of sets of k columns that are all empty, :math:`\binom{n}{k} \binom{n-k}{d}^m / \binom{n}{d}^m`.

    Example:
        >>> expected_empty_subsets(2, 3, degree=1, size=2)  # both rows in the same column, with probability 1/3
        0.333...
    """
    share = math.comb(num_columns - size, degree) / math.comb(num_columns, degree)
    return float(math.comb(num_columns, size) * share**num_rows)


def column_degree_probability(num_rows: int, num_columns: int, degree: int, count: int) -> float:
    """Probability that a column has ``count`` entries, which is Binomial(m, d / n), with mean m d / n (section 2.2).

    Example:
        >>> column_degree_probability(2, 4, degree=1, count=1)
        0.375
    """
    return float(binom.pmf(count, num_rows, degree / num_columns))


def expected_nonzero_weights(num_rows: int, degree: int) -> float:
    """Expected number of non-zero weights for uniform probabilities, m (1 - 2^-d) (Lemma 2.2).

    Example:
        >>> expected_nonzero_weights(1024, degree=10)
        1023.0
    """
    return num_rows * (1 - 2.0**-degree)


def largest_weight_bounds(degree: int, scale: float) -> tuple[float, float]:
    r"""Bounds on the expected largest |Q_i p| over p in [0, 1]^n, for normal values (Proposition 2.4).

    The maximum is the larger of the sums of the positive and of the negative values. It lies between half the sum of
    absolute values and the whole sum, whose expectation is :math:`d \sigma \sqrt{2/\pi}`.

    Example:
        >>> low, high = largest_weight_bounds(degree=10, scale=1.0)
        >>> round(low, 2), round(high, 2)
        (3.99, 7.98)
    """
    whole = degree * scale * math.sqrt(2 / math.pi)
    return whole / 2, whole


def expected_hypercube_dimension(num_columns: int, tau: float) -> float:
    """Expected number of uniform probabilities between tau and 1 - tau, n (1 - 2 tau) (Definition 2.7).

    Raises:
        ValueError: If ``tau`` is outside [0, 1/2].

    Example:
        >>> expected_hypercube_dimension(100, tau=0.25)
        50.0
    """
    if not 0.0 <= tau <= 0.5:
        raise ValueError(f"`tau` must be between 0 and 1/2, got {tau!r}.")
    return num_columns * (1 - 2 * tau)


def expected_heterozygosity(prob: float, num_clients: int, num_rounds: int, server_lr: float = 1.0) -> float:
    r"""Expected 2 p (1 - p) of an entry after rounds in which no client trains.

    Averaging K bits is one generation of the Wright-Fisher model of genetic drift: the mean of p does not change, and
    2 p (1 - p), the probability that two draws differ, shrinks by the factor :math:`1 - \eta^2 / K` in each round,
    where :math:`\eta` is the server's learning rate. So probabilities settle at 0 or 1 within about K / eta^2 rounds,
    with or without training.

    Args:
        prob: p before the first round.
        num_clients: Number K of clients in each round.
        num_rounds: Number of rounds.
        server_lr: How far p moves towards the mean of the bits, in (0, 1].

    Raises:
        ValueError: If ``server_lr`` is out of range.

    Example:
        >>> round(expected_heterozygosity(0.5, num_clients=10, num_rounds=20), 3)
        0.061
    """
    if not 0.0 < server_lr <= 1.0:
        raise ValueError(f"`server_lr` must be in (0, 1], got {server_lr!r}.")
    return 2 * prob * (1 - prob) * (1 - server_lr**2 / num_clients) ** num_rounds
