import functools
import itertools
import math
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.sums.exact_mean import MOST_TERMS, ONE, Weights


def total_of(weights: list[float], total: float) -> Weights:
    added = Weights(total)
    for weight in weights:
        added.add(weight)
    return added


def test_sum_of_weights_does_not_depend_on_order_where_a_plain_sum_does() -> None:
    orders = list(itertools.permutations((0.1, 0.2, 0.3, 0.7)))
    plain = {functools.reduce(operator.add, order) for order in orders}  # Python's `sum` compensates since 3.12
    assert len(plain) > 1  # or the test would show nothing
    assert len({total_of(list(order), 1.3).value for order in orders}) == 1


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
def test_numbers_of_examples_stay_exact(sizes: list[int]) -> None:
    weights = total_of([float(size) for size in sizes], sum(sizes))
    assert weights.value == sum(sizes)
    assert weights.sum == Fraction(sum(sizes)) * Fraction(weights.one)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=20))
def test_a_weight_is_rounded_by_at_most_2_to_the_minus_52_of_the_total(coefficients: list[float]) -> None:
    total = math.fsum(coefficients)
    weights = Weights(total)
    scale = Fraction(2) ** math.frexp(total)[1] / Fraction(ONE)
    for coefficient in coefficients:
        assert abs(weights.add(coefficient) * scale - Fraction(coefficient)) <= Fraction(total) / 2**52


@pytest.mark.parametrize("order", [sorted, lambda values: sorted(values, reverse=True)])
def test_a_total_that_was_itself_rounded_is_large_enough(order: object) -> None:
    assert callable(order)
    coefficients = [0.1 + i / 7 for i in range(MOST_TERMS)]
    assert total_of(coefficients, sum(order(coefficients))).num_terms == MOST_TERMS


def test_more_weight_than_was_announced_is_refused() -> None:
    with pytest.raises(ValueError, match="sum to more than `total_weight`=10; give the sum of all"):
        total_of([6, 6], 10)
    for weight in (-1.0, 11.0, math.nan):
        with pytest.raises(ValueError, match="must be between 0 and the total of 10, got"):
            Weights(10).add(weight)
    for total in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="`total_weight` must be finite and at least 0, got"):
            Weights(total)


def test_more_clients_than_there_is_room_for_are_refused() -> None:
    weights = total_of([0.0] * MOST_TERMS, 0)
    with pytest.raises(OverflowError, match="room for 8192 terms; ask fewer clients"):
        weights.add(0.0)
