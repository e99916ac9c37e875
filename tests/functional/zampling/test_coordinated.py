"""Bits that clients draw jointly: each with its own probability, and a mean that varies less."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.zampling import coordinated_uniforms

ENTRIES = 40_000


def draw(place: int, num_places: int, entries: int = ENTRIES) -> Tensor:
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(place + 1)
    return coordinated_uniforms(entries, place, num_places, shared, own)


def in_stratum(prob: Fraction, stratum: int, strata: int) -> Fraction:
    """Probability that a number of a stratum is below ``prob``."""
    return min(max(prob * strata - stratum, Fraction(0)), Fraction(1))


def variance_of_mean(probs: list[Fraction], strata: int) -> Fraction:
    """Of the bits of clients with these probabilities, over all pairs of a first stratum and a step."""
    squares = Fraction(0)
    for first, step in product(range(strata), range(1, strata)):
        p = [in_stratum(prob, (first + step * k) % strata, strata) for k, prob in enumerate(probs)]
        squares += sum(p) ** 2 + sum(x * (1 - x) for x in p)  # numbers within strata are independent
    return (squares / (strata * (strata - 1)) - sum(probs) ** 2) / len(probs) ** 2


def independent_variance(probs: list[Fraction]) -> Fraction:
    return sum((p * (1 - p) for p in probs), Fraction(0)) / len(probs) ** 2


@pytest.mark.parametrize("num_places", [1, 2, 4, 10])
def test_each_number_is_uniform(num_places: int) -> None:
    for place in range(num_places):
        counts = torch.histc(draw(place, num_places), bins=20, min=0.0, max=1.0)
        chi_square = float(((counts - ENTRIES / 20) ** 2 / (ENTRIES / 20)).sum())
        assert abs(chi_square - 19) < 5 * math.sqrt(2 * 19)


@pytest.mark.parametrize(("num_places", "strata"), [(2, 2), (4, 5), (10, 11)])
def test_two_clients_are_never_in_one_stratum_and_equally_often_in_any_two(num_places: int, strata: int) -> None:
    one, two = ((draw(place, num_places) * strata).long() for place in (0, num_places - 1))
    counts = (one * strata + two).bincount(minlength=strata**2).view(strata, strata).double()
    assert not counts.diagonal().any()
    expected = ENTRIES / (strata * (strata - 1))
    deviations = (counts - expected)[~torch.eye(strata, dtype=torch.bool)].abs()
    assert float(deviations.max()) < 5 * math.sqrt(expected)


@pytest.mark.parametrize(
    "probs",
    [[0.5] * 10, [0.37] * 10, [0.03] * 10, [0.5] * 5 + [0.0] * 5, [k / 9 for k in range(10)], [0.1, 0.8, 0.35]],
    ids=["half", "0.37", "rare", "two kinds", "all kinds", "three"],
)
def test_the_mean_varies_as_enumeration_says_and_less_than_with_independent_draws(probs: list[float]) -> None:
    strata = 11 if len(probs) == 10 else 3
    exact = [Fraction(p) for p in probs]
    drawn = torch.stack([(draw(k, len(probs)) < p).double() for k, p in enumerate(probs)]).mean(0)
    expected = float(variance_of_mean(exact, strata))
    error = drawn - float(sum(exact)) / len(probs)
    fourth = float((error**4).mean())
    assert abs(float(error.mean())) < 5 * math.sqrt(expected / ENTRIES)
    assert abs(float((error**2).mean()) - expected) < 5 * math.sqrt(fourth / ENTRIES)
    assert variance_of_mean(exact, strata) < independent_variance(exact)


def test_equal_probabilities_and_a_prime_number_of_clients_leave_the_fraction_alone() -> None:
    for tenths in range(11):
        p = Fraction(tenths, 10)
        fraction = (5 * p) % 1
        assert variance_of_mean([p] * 5, 5) == fraction * (1 - fraction) / 25


def test_clients_in_one_place_vary_more_than_independent_ones() -> None:
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(9)
    numbers = draw(3, 10), coordinated_uniforms(ENTRIES, 3, 10, shared, own)
    both = torch.stack([(drawn < 0.5).double() for drawn in numbers]).mean(0)
    assert float(both.var()) > 1.5 * float(independent_variance([Fraction(1, 2)] * 2))
