from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.sums.exact_sum import (
    COARSE,
    FINE,
    LARGEST,
    MOST_TERMS,
    NARROW,
    ExactSum,
    cut,
    largest_magnitudes,
    unit_for,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def exact_sum(before: float, size: int = 1) -> ExactSum:
    return ExactSum(torch.zeros(size, dtype=torch.float64), before)


@given(st.floats(-(2.0**91), 2.0**91))
def test_cut_splits_a_number_without_loss_into_whole_coarse_steps_and_less_than_one(steps: float) -> None:
    rest = torch.tensor([steps], dtype=torch.float64)
    coarse = cut(rest)
    assert float(coarse) == round(Fraction(steps) / Fraction(COARSE))
    assert Fraction(float(coarse)) * Fraction(COARSE) + Fraction(float(rest)) == Fraction(steps)
    assert abs(float(rest)) <= COARSE / 2


def test_both_sums_have_room_for_the_worst_round() -> None:
    """Whole numbers are exact in float64 up to 2^53; weights sum to 1, plus a step of 2^-52 for each."""
    weights = 1 + Fraction(MOST_TERMS, 2**52)
    rounding = Fraction(1, 2) * MOST_TERMS
    narrow, rests = Fraction(NARROW * FINE), Fraction(COARSE / 2) * MOST_TERMS
    assert weights * narrow + rests + rounding <= 2**53
    assert weights * Fraction(2 * LARGEST * FINE / COARSE) + rounding <= 2**53


@given(st.floats(0, LARGEST))
def test_unit_is_the_power_of_two_above_the_tensor_and_at_least_one(before: float) -> None:
    unit = unit_for(before)
    assert unit == 1 or unit / 2 <= before < unit
    assert not exact_sum(before).is_wide((NARROW - 1) * unit)
    assert exact_sum(before).is_wide(NARROW * unit * (1 + 2**-50))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * LARGEST])
def test_what_cannot_be_summed_is_refused_by_rule_and_value(value: float) -> None:
    with pytest.raises(OverflowError, match=r"at most 1\.09951e\+12 in magnitude; 'w' has .* after local training"):
        exact_sum(1.0).check("w", value)
    with pytest.raises(OverflowError, match=r"'w' has .* before local training"):
        exact_sum(value).check("w", 1.0)
    exact_sum(LARGEST).check("w", LARGEST)


def test_coarse_part_exists_once_a_term_needs_it() -> None:
    total = exact_sum(0.0, size=2)
    total.fine += 3.0
    assert torch.equal(total.total(), torch.full((2,), 3.0, dtype=torch.float64))
    total.widen()[1] = 2.0
    assert torch.equal(total.total(), torch.tensor([3.0, 3.0 + 2 * COARSE], dtype=torch.float64))
    assert torch.equal(total.total(0, torch.tensor([1])), torch.tensor([3.0 + 2 * COARSE], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int8, torch.bool])
def test_largest_magnitude_of_every_type_is_exact(dtype: torch.dtype) -> None:
    tensors = {"a": torch.tensor([[0, -1], [1, 1]]).to(dtype), "none": torch.zeros(0, 3, dtype=dtype)}
    tensors["scalar"] = torch.tensor(1).to(dtype)
    others = {"large": torch.tensor(-70_000), "fine": torch.tensor([1 + 2**-50], dtype=torch.float64)}
    expected = {"a": 1.0, "none": 0.0, "scalar": 1.0, "large": 70_000.0, "fine": 1 + 2**-50}
    assert largest_magnitudes({**tensors, **others}) == expected


def test_largest_magnitude_of_not_a_number_is_not_a_number() -> None:
    found = largest_magnitudes({"bad": torch.tensor([1.0, float("nan"), 2.0]), "good": torch.tensor([-2.0])})
    assert str(found) == "{'bad': nan, 'good': 2.0}"
    assert largest_magnitudes({}) == {}
