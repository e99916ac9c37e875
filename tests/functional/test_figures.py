"""Ranks, entropies, variances and fairness against their definitions written out."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.functional.figures import (
    decile_means,
    entropy_rank,
    gini_coefficient,
    jain_index,
    marginal_entropy,
    participation_rank,
    sampled_update_variance,
    sampled_variance,
    stable_rank,
    step_size_variance,
)
from lightning_spectral.functional.sampling.inclusion import top_inclusion_probs

RANKS = [entropy_rank, participation_rank, stable_rank]


@pytest.mark.parametrize("rank", RANKS)
def test_equal_values_count_fully_and_zeros_not_at_all(rank: object) -> None:
    assert rank(torch.tensor([2.0] * 5 + [0.0] * 3)) == pytest.approx(5.0)  # type: ignore[operator]
    assert rank(torch.zeros(4)) == 0.0  # type: ignore[operator]


@given(values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=20), scale=st.floats(1e-6, 1e6))
def test_ranks_lie_between_one_and_n_in_any_unit(values: list[float], scale: float) -> None:
    s = torch.tensor(values, dtype=torch.float64)
    for rank in RANKS:
        assert 1 - 1e-9 <= rank(s) <= len(values) + 1e-9
        assert rank(scale * s) == pytest.approx(rank(s), rel=1e-9)


def test_ranks_equal_their_formulas() -> None:
    values = [5.0, 2.0, 1.0, 0.5]
    shares = [v / 8.5 for v in values]
    s = torch.tensor(values)
    assert entropy_rank(s) == pytest.approx(2 ** -sum(p * math.log2(p) for p in shares))
    assert participation_rank(s) == pytest.approx(1 / sum(p * p for p in shares))
    assert stable_rank(s) == pytest.approx(sum(v * v for v in values) / 25)


def test_entropy_equals_the_formula_of_the_paper():
    probs = [1.0, 0.7, 0.2, 0.1, 0.0]
    mean = sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in probs if 0 < p < 1) / 5
    even = -0.4 * math.log(0.4) - 0.6 * math.log(0.6)
    assert marginal_entropy(torch.tensor(probs, dtype=torch.float64)) == pytest.approx(mean / even, rel=1e-13)


def test_entropy_is_one_for_equal_probabilities_and_zero_without_chance():
    assert marginal_entropy(torch.full((8,), 0.375)) == 1.0
    assert marginal_entropy(top_inclusion_probs(torch.rand(8, generator=torch.Generator()), 3)) == 0.0
    assert marginal_entropy(torch.ones(8)) == 0.0


def test_no_probabilities_have_more_entropy_than_equal_ones():
    for row in torch.rand(100, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64):
        assert marginal_entropy(3 / 6 + 0.4 * (row - row.mean())) <= 1


PROBS = torch.tensor([0.2, 1.0, 0.5, 0.9], dtype=torch.float64)
WEIGHTS = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)


def independent(probs: Tensor) -> list[tuple[float, Tensor]]:
    """Every set of active processors with its probability."""
    outcomes = []
    for pattern in itertools.product([0.0, 1.0], repeat=len(probs)):
        active = torch.tensor(pattern, dtype=torch.float64)
        outcomes.append((float(torch.where(active > 0, probs, 1 - probs).prod()), active))
    return outcomes


PAIRS = [(chance, torch.tensor(active, dtype=torch.float64)) for chance, active in [
    (0.5, [1, 1, 0, 0]), (0.2, [0, 1, 1, 0]), (0.3, [1, 0, 0, 1]),
]]  # fmt: skip


def error(outcomes: list[tuple[float, Tensor]], probs: Tensor, values: Tensor) -> float:
    """Mean squared distance between sum x / p over the active and sum x; values (P,) or (P, D)."""
    flat = values.reshape(len(values), -1)
    expanded = torch.where(probs > 0, 1 / probs, 0.0)[:, None] * flat
    return sum(chance * float(((active @ expanded) - flat.sum(0)).square().sum()) for chance, active in outcomes)


def test_independent_draws_vary_as_in_an_enumeration() -> None:
    values = torch.tensor([0.7, -1.0, 2.0, 0.3], dtype=torch.float64)
    assert abs(step_size_variance(WEIGHTS, PROBS) - error(independent(PROBS), PROBS, WEIGHTS)) < 1e-14
    assert abs(sampled_variance(values, PROBS) - error(independent(PROBS), PROBS, values)) < 1e-13
    both = torch.outer(PROBS, PROBS).fill_diagonal_(0.0) + PROBS.diag()
    assert abs(sampled_variance(values, PROBS, both) - sampled_variance(values, PROBS)) < 1e-13


def test_draws_that_depend_on_each_other_vary_as_in_an_enumeration() -> None:
    joint = sum((chance * torch.outer(active, active) for chance, active in PAIRS), torch.zeros(4, 4).double())
    probs = joint.diagonal()
    expected = error(PAIRS, probs, WEIGHTS)
    assert abs(step_size_variance(WEIGHTS, probs, joint) - expected) < 1e-14
    assert abs(step_size_variance(WEIGHTS, probs) - expected) > 0.1  # the formula for independent draws is another


@pytest.mark.parametrize("with_joint", [False, True])
def test_weight_that_is_never_drawn_counts_as_bias(with_joint: bool) -> None:
    probs = torch.tensor([0.2, 0.0, 0.5, 0.9], dtype=torch.float64)
    joint = torch.outer(probs, probs).fill_diagonal_(0.0) + probs.diag() if with_joint else None
    figure = step_size_variance(WEIGHTS, probs, joint)
    assert abs(figure - error(independent(probs), probs, WEIGHTS)) < 1e-14
    assert figure > 0.4**2
    assert abs(step_size_variance(WEIGHTS, torch.zeros(4)) - 1) < 1e-12
    assert step_size_variance(torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])) == 0  # no weight, nothing missing


def test_error_of_the_average_update_follows_from_norms() -> None:
    updates = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert abs(sampled_update_variance(updates.norm(dim=1), PROBS) - error(independent(PROBS), PROBS, updates)) < 1e-12
    assert sampled_update_variance(torch.tensor([0.0, 3.0]), torch.tensor([0.0, 0.0])) == 0  # left out, as it says


@pytest.mark.parametrize(
    ("weights", "probs", "joint", "message"),
    [
        ([0.5, 0.4], [1.0, 1.0], None, "must be non-negative and sum to one, got the sum 0.9"),
        ([1.5, -0.5], [1.0, 1.0], None, "must be non-negative and sum to one"),
        ([math.nan, 1.0], [1.0, 1.0], None, "got the sum nan"),
        ([0.5, 0.5], [1.0, 1.5], None, r"`probs` must be in \[0, 1\], got 1.5 at index 1"),
        ([0.5, 0.5], [1.0, -0.5], None, "`probs` must be finite and non-negative, got -0.5"),
        ([0.5, 0.5], [1.0], None, r"each processor needs a value and a probability, got \(2,\) and \(1,\)"),
        ([0.5, 0.5], [0.5, 0.5], [[0.5]], r"`joint` must have shape \(2, 2\), got \(1, 1\)"),
        ([0.5, 0.5], [0.5, 0.5], [[0.5, 0.0], [0.0, 0.6]], "diagonal of `joint` must be `probs`"),
    ],
)
def test_bad_input_is_refused(weights, probs, joint, message):
    with pytest.raises(ValueError, match=message):
        step_size_variance(torch.tensor(weights), torch.tensor(probs), None if joint is None else torch.tensor(joint))


def test_values_that_are_not_finite_and_negative_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="values must be finite, got inf"):
        sampled_variance(torch.tensor([1.0, math.inf]), torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="`norms` must be non-negative, got -1"):
        sampled_update_variance(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.5]))


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


def literally(image: np.ndarray) -> np.ndarray:
    """The formula of `tf.image.per_image_standardization` for one image."""
    values = image.astype(np.float64)
    return (values - values.mean()) / max(values.std(), 1 / np.sqrt(values.size))


@pytest.mark.parametrize(
    ("shape", "image_dims"),
    [((5, 3, 8, 6), 3), ((3, 8, 6), 3), ((2, 5, 8, 6, 3), 3), ((5, 8, 6), 2), ((4, 1, 1, 1), 3)],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_each_image_is_standardised_as_numpy_does_it(shape, image_dims, dtype):
    images = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = ls.functional.standardize_images(images, image_dims)
    expected = np.stack([literally(image) for image in images.reshape(-1, *shape[-image_dims:]).numpy()]).reshape(shape)
    assert found.dtype == (dtype if dtype.is_floating_point else torch.float32)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 if found.dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("contrast", [0.0, 1e-4, 0.01, 0.5])
def test_images_of_little_contrast_are_bounded_not_blown_up(contrast: float) -> None:
    # 48 values: the bound is a standard deviation of 0.14
    image = 0.7 + contrast * (torch.arange(48, dtype=torch.float64) % 2).reshape(3, 4, 4)
    found = ls.functional.standardize_images(image)
    assert found.std(correction=0).item() == pytest.approx(min(1.0, contrast / 2 * 48**0.5), abs=1e-12)
    assert not (contrast == 0.0 and found.any())
