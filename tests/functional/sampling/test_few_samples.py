"""Systematic and minimum support sampling against exact rational arithmetic."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import spectra
from torch import Tensor

from lightning_spectral.functional import (
    draw_from_support,
    draw_systematic,
    minimum_support,
    proportional_inclusion_probs,
    support_joint_probs,
    systematic_support,
)
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.without_fit import ONE, whole_units

Law = dict[tuple[int, ...], Fraction]


def minimum_support_by_splitting(pi: list[Fraction], n: int) -> Law:
    """Deville & Tillé's splitting as published: p -> (p - alpha s) / (1 - alpha), with the n largest as s."""
    law: Law = {}
    p, left = list(pi), Fraction(1)
    while True:
        order = sorted(range(len(p)), key=lambda i: -p[i])  # stable: ties by position
        chosen, others = order[:n], order[n:]
        alpha = min(p[chosen[-1]], 1 - p[others[0]]) if others else Fraction(1)
        key = tuple(sorted(chosen))
        law[key] = law.get(key, Fraction(0)) + left * alpha
        if alpha == 1:
            return law
        p = [(x - alpha * (i in chosen)) / (1 - alpha) for i, x in enumerate(p)]
        left *= 1 - alpha


def systematic_by_stepping(pi: list[Fraction], order: tuple[int, ...], step: Fraction) -> Law:
    """Move the start through all multiples of a step that divides every probability."""
    law: Law = {}
    for k in range(int(1 / step)):
        start, total, drawn = k * step, Fraction(0), []
        for i in order:
            points_before = -((start - total) // 1)  # number of points start + j < total, j >= 0
            total += pi[i]
            if -((start - total) // 1) > points_before:
                drawn.append(i)
        key = tuple(sorted(drawn))
        law[key] = law.get(key, Fraction(0)) + step
    return law


def law_of(support) -> Law:
    law: Law = {}
    for terms, units in zip(support.samples.tolist(), support.units.tolist(), strict=True):
        law[tuple(terms)] = law.get(tuple(terms), Fraction(0)) + Fraction(units, ONE)
    return law


STEP = Fraction(1, 64)
CASES = [[48, 32, 32, 16], [60, 50, 40, 20, 12, 6, 3, 1], [64, 10, 54, 0, 33, 31], [16] * 8, [63, 63, 1, 1, 32, 32]]


@pytest.mark.parametrize("parts", CASES)
def test_minimum_support_equals_the_published_splitting(parts):
    pi = [part * STEP for part in parts]
    support = minimum_support(torch.tensor(parts, dtype=torch.float64) / 64)
    assert law_of(support) == minimum_support_by_splitting(pi, int(sum(pi)))


@pytest.mark.parametrize("parts", CASES)
def test_systematic_support_equals_stepping_through_all_starts(parts):
    pi = [part * STEP for part in parts]
    support = systematic_support(torch.tensor(parts, dtype=torch.float64) / 64)
    assert law_of(support) == systematic_by_stepping(pi, tuple(range(len(pi))), STEP)


def excess(draws: Tensor, law: Law) -> float:
    """Largest deviation of a sample's frequency in units of what chance allows."""
    rows, size = [tuple(row) for row in draws.tolist()], len(draws)
    counts = {terms: rows.count(terms) for terms in set(rows)}
    assert set(counts) <= set(law)
    return max(
        abs(counts.get(terms, 0) / size - float(p)) / (5 * float(p * (1 - p) / size) ** 0.5 + 1 / size)
        for terms, p in law.items()
    )


@pytest.mark.parametrize("parts", CASES)
def test_draws_from_a_list_have_its_law(parts):
    pi = torch.tensor(parts, dtype=torch.float64) / 64
    generator = torch.Generator().manual_seed(0)
    support = minimum_support(pi)
    assert excess(draw_from_support(support, 10_000, generator), law_of(support)) <= 1
    assert excess(draw_systematic(pi, 10_000, generator), law_of(systematic_support(pi))) <= 1


def test_shuffled_systematic_draws_have_the_law_averaged_over_all_orders():
    parts = [60, 50, 40, 20, 16, 6]
    pi, law = [part * STEP for part in parts], {}
    orders = list(itertools.permutations(range(6)))
    for order in orders:
        for terms, p in systematic_by_stepping(pi, order, 2 * STEP).items():
            law[terms] = law.get(terms, Fraction(0)) + p / len(orders)
    probs = torch.tensor(parts, dtype=torch.float64) / 64
    assert excess(draw_systematic(probs, 20_000, torch.Generator().manual_seed(1), shuffled=True), law) <= 1
    # Negative control: without shuffling the same sets come up, at most six of them, far too often.
    assert excess(draw_systematic(probs, 20_000, torch.Generator().manual_seed(1)), law) > 1


@settings(deadline=None, max_examples=150)
@given(spectra, st.data())
def test_lists_hold_at_most_n_samples_with_the_given_probabilities(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    pi = proportional_inclusion_probs(torch.tensor(values, dtype=torch.float64), n)
    for support in (minimum_support(pi), systematic_support(pi)):
        assert len(support.samples) <= len(values)
        assert int(support.units.sum()) == ONE
        assert (support.units > 0).all()
        assert (support.samples.diff(dim=1) > 0).all()
        joint = support_joint_probs(support, len(pi))
        # The sum of the input is off by rounding, which is spread over the open terms.
        torch.testing.assert_close(joint.diagonal(), pi, rtol=0, atol=2e-13)
        torch.testing.assert_close(joint.sum(1), n * joint.diagonal(), rtol=1e-14, atol=0)
        assert (joint.diagonal()[pi >= 1 - 1e-13] == 1).all()
        assert (joint.diagonal()[pi <= 1e-13] == 0).all()


@pytest.mark.parametrize("n", [410, 4095])
def test_lists_handle_4096_terms(n):
    pi = proportional_inclusion_probs(1 / torch.arange(1, 4097, dtype=torch.float64).sqrt(), n)
    for support in (minimum_support(pi), systematic_support(pi)):
        marginals = torch.zeros(4096, dtype=torch.int64)
        marginals.index_add_(0, support.samples.flatten(), support.units.repeat_interleave(n))
        torch.testing.assert_close(marginals.double() / ONE, pi, rtol=0, atol=1e-12)


def test_whole_units_spread_the_rounding_error_of_the_sum():
    pi = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    pi = proportional_inclusion_probs(pi, 1777).float()  # float32: the sum is off by up to 1e-3
    parts = open_terms(pi)
    units = whole_units(parts)
    assert int(units.sum()) == parts.num_terms * ONE
    assert ((units > 0) & (units < ONE)).all()
    torch.testing.assert_close(units.double() / ONE, parts.probs, rtol=0, atol=1.5 / ONE)  # rounding and one unit


def test_too_many_terms_for_whole_units_are_named():
    with pytest.raises(ValueError, match="at most 8191 open terms, got 8200; use ConditionalPoisson"):
        systematic_support(torch.full((16_400,), 0.5))
