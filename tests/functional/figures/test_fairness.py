"""Figures of how evenly a metric is spread over clients, against their definitions written out."""

import math
from fractions import Fraction

import pytest
import torch

from lightning_spectral.functional import decile_means, gini_coefficient, jain_index

GRAINS = {
    "one client": [3],
    "equal": [2] * 12,
    "ten": [7, 1, 1, 9, 3, 0, 0, 5, 8, 2],
    "twenty-three": [(7 * i * i + 3) % 31 for i in range(23)],
    "nothing": [0, 0, 0],
}


@pytest.mark.parametrize("values", GRAINS.values(), ids=GRAINS)
def test_figures_equal_their_definitions(values: list[int]) -> None:
    num, total = len(values), sum(values)
    pairs = sum(abs(one - other) for one in values for other in values)
    gini = Fraction(pairs, 2 * num * total) if total else Fraction(0)
    jain = Fraction(total**2, num * sum(value**2 for value in values)) if total else Fraction(1)
    tenth = math.ceil(Fraction(num, 10))
    ordered = sorted(values)
    x = torch.tensor(values)
    assert gini_coefficient(x) == pytest.approx(float(gini), abs=1e-15)
    assert jain_index(x) == pytest.approx(float(jain), rel=1e-15)
    assert decile_means(x) == pytest.approx((sum(ordered[:tenth]) / tenth, sum(ordered[-tenth:]) / tenth), rel=1e-15)


def test_order_and_unit_do_not_matter() -> None:
    x = torch.rand(31, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for figure in (gini_coefficient, jain_index):
        assert figure(1000 * x.flip(0)) == pytest.approx(figure(x), rel=1e-12)
    assert 0 < gini_coefficient(x) < 1 - 1 / 31
    assert decile_means(-x)[0] == -decile_means(x)[1]


def test_a_client_without_a_value_is_not_hidden() -> None:
    x = torch.tensor([0.5, math.nan, 0.1])
    assert all(math.isnan(figure) for figure in (*decile_means(x), gini_coefficient(x), jain_index(x)))


@pytest.mark.parametrize("figure", [decile_means, gini_coefficient, jain_index])
def test_no_clients_and_matrices_are_refused(figure: object) -> None:
    for wrong in (torch.zeros(0), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match="one value for each client, at least one; got"):
            figure(wrong)  # type: ignore[operator]


@pytest.mark.parametrize("figure", [gini_coefficient, jain_index])
def test_negative_values_are_refused_where_shares_are_meant(figure: object) -> None:
    with pytest.raises(ValueError, match=r"`values` must be non-negative, got -0\.5"):
        figure(torch.tensor([1.0, -0.5]))  # type: ignore[operator]
