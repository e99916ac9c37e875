import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.protocol.exact_sum import GRIDS, LARGEST, MOST_TERMS, ExactSum, largest_magnitude

FLOATS = st.floats(-(2.0**50), 2.0**50, allow_subnormal=False)
TERMS = st.lists(st.tuples(FLOATS, st.integers(1, 1000)), min_size=1, max_size=6)


def sum_of(terms: list[tuple[torch.Tensor, float]]) -> ExactSum:
    total = ExactSum(terms[0][0].shape)
    for values, weight in terms:
        total.add(values, weight)
    return total


def spread_out(count: int, seed: int = 0) -> list[tuple[torch.Tensor, float]]:
    """Terms of very different sizes, so that plain sums lose different digits in different orders."""
    generator = torch.Generator().manual_seed(seed)
    scales = [10.0 ** (4 - 3 * (i % 4)) for i in range(count)]
    return [
        (scale * torch.randn(500, generator=generator, dtype=torch.float64), 1.0 + i) for i, scale in enumerate(scales)
    ]


@given(TERMS)
def test_sum_is_the_exact_one_of_terms_rounded_to_the_finest_grid(terms: list[tuple[float, int]]) -> None:
    """The oracle adds fractions: each weighted term rounded to a multiple of 2^-60, then no rounding at all."""
    total = sum_of([(torch.tensor([value], dtype=torch.float64), weight) for value, weight in terms])
    finest = Fraction(GRIDS[0])
    exact = sum(round(Fraction(value * weight) / finest) * finest for value, weight in terms)
    assert sum(Fraction(float(part)) for part in total.parts) == exact
    # three parts are joined by two roundings
    size = sum(abs(Fraction(float(part))) for part in total.parts)
    assert abs(Fraction(float(total.total())) - exact) <= 2 * Fraction(2) ** -53 * size


def test_float32_terms_of_ordinary_size_are_summed_without_any_error_but_the_last_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [(torch.randn(300, generator=generator), 3.0 + i) for i in range(7)]
    slow = [math.fsum(float(values[i].double()) * weight for values, weight in terms) for i in range(300)]
    torch.testing.assert_close(
        sum_of(terms).total(), torch.tensor(slow, dtype=torch.float64), rtol=2.0**-53, atol=7 * 2.0**-61
    )


def test_bits_do_not_depend_on_order_or_grouping_where_those_of_plain_sums_do() -> None:
    terms = spread_out(5)
    plain, exact = [], []
    for order in itertools.permutations(terms):
        plain.append(torch.stack([values * weight for values, weight in order]).cumsum(0)[-1])
        exact.append(sum_of(list(order)).total())
    assert all(torch.equal(total, exact[0]) for total in exact)
    assert not all(torch.equal(total, plain[0]) for total in plain)  # or the test would show nothing
    for cut in range(1, 5):
        left, right = sum_of(terms[:cut]), sum_of(terms[cut:])
        right.merge(left)
        assert torch.equal(right.total(), exact[0])


@pytest.mark.parametrize("size", [1, 2**15, 2**15 + 1, 70_000])
def test_blocks_and_slices_do_not_change_the_sum(size: int) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    whole, sliced = ExactSum((size,)), ExactSum((2, size))
    whole.add(values, 3.0)
    sliced.add_at(0, torch.tensor([1]), values[None], 3.0)
    slow = torch.tensor([math.fsum([float(v) * 3.0]) for v in values[-5:].double()], dtype=torch.float64)
    assert torch.equal(whole.total(), sliced.total()[1])
    assert not bool(sliced.total()[0].any())
    torch.testing.assert_close(whole.total()[-5:], slow, rtol=2.0**-53, atol=2.0**-61)


def test_zeros_add_nothing_to_any_part() -> None:
    total = sum_of(spread_out(3))
    before = [part.clone() for part in total.parts]
    total.add(torch.zeros(500), 1000.0)
    assert all(torch.equal(part, old) for part, old in zip(total.parts, before, strict=True))


def test_coarsest_part_comes_with_the_first_large_term_and_changes_no_smaller_one() -> None:
    small, large = (torch.tensor([0.1, 0.2]), 1.0), (torch.tensor([1e12, 0.3]), 1.0)
    assert len(sum_of([small]).parts) == 2
    first, last = sum_of([small, large]), sum_of([large, small])
    assert len(first.parts) == 3
    assert torch.equal(first.total(), last.total())
    narrow = sum_of([small])
    narrow.merge(sum_of([large]))
    assert torch.equal(narrow.total(), first.total())


def test_a_full_sum_of_the_worst_terms_is_still_exact() -> None:
    """Every part as large as it can be, with one sign, as often as the sum has room for."""
    worst = sum(grid / 2 for grid in GRIDS[1:]) - GRIDS[0]
    total = ExactSum((1,))
    for _ in range(MOST_TERMS):
        total.add(torch.tensor([worst], dtype=torch.float64))
    cut = round(Fraction(worst) / Fraction(GRIDS[0])) * Fraction(GRIDS[0])
    assert sum(Fraction(float(part)) for part in total.parts) == MOST_TERMS * cut
    with pytest.raises(OverflowError, match="room for 8192 terms; ask fewer clients"):
        total.add(torch.zeros(1))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2 * LARGEST])
def test_what_cannot_be_summed_is_refused_and_leaves_no_trace(value: float) -> None:
    total = ExactSum((2,))
    with pytest.raises(OverflowError, match=r"must be finite and at most 1\.15292e\+18"):
        total.add(torch.tensor([value, 1.0]))
    assert torch.equal(total.total(), torch.zeros(2).double())


def test_largest_magnitude_sees_every_tensor() -> None:
    assert largest_magnitude([torch.zeros(0), torch.tensor([1.0, -3.0]), torch.tensor(2.0).double()]) == 3.0
    assert largest_magnitude([]) == 0.0
    assert math.isnan(largest_magnitude([torch.ones(2), torch.tensor([float("nan")])]))
