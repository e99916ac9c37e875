"""Bits of several clients, coordinated so that their mean is close to the mean of their probabilities."""

from __future__ import annotations

from itertools import count
from math import isqrt

import torch
from torch import Tensor

BELOW_ONE = 1.0 - 2.0**-53


def coordinated_uniforms(
    num_entries: int, place: int, num_places: int, shared: torch.Generator, own: torch.Generator
) -> Tensor:
    r"""Draw numbers in [0, 1) for one of K clients, such that no two clients' numbers for an entry share a stratum.

    There are P strata, where P is the least prime that is at least K. The k-th client's stratum for an entry is
    a + s k modulo P, where a and s > 0 are random and the same for all clients. So each number is uniform on its own,
    and the strata of two clients are uniform over all pairs of distinct strata. This takes two random integers per
    entry, whatever K is.

    Let the bit of client k be 1 if its number is below :math:`p_k`. The bits of two clients then have covariance
    :math:`-\mathrm{cov}(m_k, m_l) / (P - 1)`, where :math:`m_k` is the mean of the bit in a stratum drawn at random.
    For every client these means fall from stratum to stratum, so no covariance of bits is positive: the variance of the
    mean of the bits is never larger than with independent draws. With equal p and K = P it is
    :math:`f(1 - f)/K^2`, where f is the fractional part of K p, as opposed to :math:`p(1 - p)/K` for independent draws.

    Args:
        num_entries: Number of entries.
        place: The client's number k, from 0.
        num_places: Number K of clients.
        shared: Generator with the same state for all clients of a round.
        own: The client's own generator.

    Returns:
        Shape ``(num_entries,)``, float64, on the CPU.

    Reference:
        McKay, Beckman & Conover (1979), Latin hypercube sampling, whose strata are drawn by a random permutation.

    Example:
        >>> def generator(seed: int) -> torch.Generator:
        ...     return torch.Generator().manual_seed(seed)
        >>> drawn = [coordinated_uniforms(4, k, 5, generator(0), generator(k + 1)) for k in range(5)]
        >>> sum((numbers < 0.4).int() for numbers in drawn)
        tensor([2, 2, 2, 2], dtype=torch.int32)
    """
    strata = _prime_from(num_places)
    first = torch.randint(strata, (num_entries,), generator=shared)
    step = torch.randint(1, strata, (num_entries,), generator=shared)
    within = torch.rand(num_entries, generator=own, dtype=torch.float64)
    numbers = (((first + step * place) % strata) + within) / strata
    return numbers.clamp(max=BELOW_ONE)  # the last stratum may round up


def _prime_from(least: int) -> int:
    """The least prime that is at least ``least``."""
    return next(n for n in count(max(least, 2)) if all(n % divisor for divisor in range(2, isqrt(n) + 1)))
