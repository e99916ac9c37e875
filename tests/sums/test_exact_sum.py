from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_spectral.sums.exact_mean import (
    COARSE_BITS,
    FINE,
    LARGEST,
    MOST_TERMS,
    NEAR,
    MeanChange,
    cut,
    join,
    largest_magnitudes,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
COARSE = 2**COARSE_BITS


@given(st.floats(-(2.0**91), 2.0**91))
def test_cut_splits_a_number_without_loss_into_whole_coarse_steps_and_less_than_one(steps: float) -> None:
    rest = torch.tensor([steps], dtype=torch.float64)
    coarse = cut(rest)
    assert float(coarse) == round(Fraction(steps) / COARSE)
    assert Fraction(float(coarse)) * COARSE + Fraction(float(rest)) == Fraction(steps)
    assert abs(float(rest)) <= COARSE / 2


def test_both_sums_have_room_for_the_worst_round() -> None:
    """Weights sum to 1, plus a step of 2^-52 for each; the coarse sum must also be exact in float64."""
    weights = 1 + Fraction(MOST_TERMS, 2**52)
    near, rests, rounding = Fraction(NEAR * FINE), Fraction(COARSE, 2) * MOST_TERMS, Fraction(1, 2) * MOST_TERMS
    assert weights * near + rests + rounding < 2**63
    assert weights * Fraction(2 * LARGEST * FINE) / COARSE + rounding + Fraction(2**63, COARSE) <= 2**53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**52), 2**52))
def test_sums_are_joined_with_one_rounding(steps: int, coarse: int) -> None:
    joined = join(torch.tensor([steps]), torch.tensor([coarse]))
    assert joined.tolist() == [float(steps + coarse * COARSE)]
    assert join(torch.tensor([steps])).tolist() == [float(steps)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2 * LARGEST])
def test_what_cannot_be_summed_is_refused_by_rule_and_value(value: float) -> None:
    one = {"w": torch.ones(1)}
    with pytest.raises(OverflowError, match=r"at most 1\.09951e\+12 in magnitude; 'w' has .* after local training"):
        MeanChange(one, 1).add({"w": torch.tensor([value])}, 1)
    with pytest.raises(OverflowError, match=r"'w' has .* before local training"):
        MeanChange({"w": torch.tensor([value])}, 1).add(one, 1)
    MeanChange({"w": torch.tensor([LARGEST])}, 1).add({"w": torch.tensor([LARGEST])}, 1)


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
