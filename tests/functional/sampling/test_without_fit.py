"""Draws: Brewer's, systematic and minimum support against exact laws; what all draws share; and numbers made with R."""

import itertools
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import excess, spectra
from torch import Tensor

from lightning_spectral.designs import RandomSystematic, Systematic
from lightning_spectral.functional.sampling.conditional_poisson import draw_conditional_poisson, working_open_terms
from lightning_spectral.functional.sampling.inclusion import proportional_inclusion_probs
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.successive_sampling import draw_successive
from lightning_spectral.functional.sampling.without_fit import (
    ONE,
    brewer_weights,
    draw_brewer,
    draw_from_support,
    minimum_support,
    support_joint_probs,
    systematic_support,
    whole_units,
)

PROBS = {
    "steep": [0.9, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05, 0.05],
    "nearly certain": [0.999, 0.99, 0.9, 0.5, 0.4, 0.2, 0.01, 0.001],
    "ties": [0.5] * 10,
    "half, twelve": [0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05],
    "one of five": [0.5, 0.3, 0.1, 0.06, 0.04],
    "all but one": [0.99, 0.9, 0.7, 0.41],
}


def law_by_enumeration(pi: np.ndarray, n: int) -> dict[tuple[int, ...], float]:
    """Set by set, adding one term at a time with the formula as published: pi (R - pi) / (R - r pi)."""
    law = {frozenset(): 1.0}
    for left in range(n, 0, -1):
        longer: dict[frozenset[int], float] = {}
        for drawn, probability in law.items():
            others = [i for i in range(len(pi)) if i not in drawn]
            rest = n - sum(pi[i] for i in drawn)
            weights = np.array([pi[i] * (rest - pi[i]) / (rest - pi[i] * left) for i in others])
            for i, share in zip(others, weights / weights.sum(), strict=True):
                longer[drawn | {i}] = longer.get(drawn | {i}, 0.0) + probability * share
        law = longer
    return {tuple(sorted(terms)): p for terms, p in law.items()}


@pytest.mark.parametrize("name", PROBS)
def test_draws_have_the_enumerated_joint_law(name):
    pi = np.array(PROBS[name])
    law = law_by_enumeration(pi, round(pi.sum()))
    marginals = sum(p * np.isin(range(len(pi)), terms) for terms, p in law.items())
    np.testing.assert_allclose(marginals, pi, atol=1e-13, rtol=0)  # of the published formula
    assert excess(draw_brewer(open_terms(torch.tensor(pi)), 40_000, torch.Generator().manual_seed(0)), law) <= 1


def test_draws_without_the_correction_are_detected():
    """The negative control: draws one by one in proportion to the inclusion probabilities."""
    pi = np.array(PROBS["steep"])
    draws = torch.tensor(pi).expand(40_000, -1).multinomial(3, generator=torch.Generator().manual_seed(0))
    assert excess(draws.sort(1).values, law_by_enumeration(pi, 3)) > 1


def test_certain_and_impossible_terms_do_not_affect_the_other_terms():
    pi = torch.tensor([1.0, 0.9, 0.0, 0.7, 0.4, 1.0], dtype=torch.float64)
    with_them = draw_brewer(open_terms(pi), 100, torch.Generator().manual_seed(0))
    without = draw_brewer(open_terms(pi[[1, 3, 4]]), 100, torch.Generator().manual_seed(0))
    assert (with_them[:, [0, -1]] == torch.tensor([0, 5])).all()
    assert torch.equal(with_them[:, 1:-1], torch.tensor([1, 3, 4])[without])


def test_entries_a_trillionth_from_zero_and_one_keep_full_precision():
    """Weights of all terms at every first and second draw, against exact rational numbers."""
    pi = torch.tensor([1 - 1e-12, 1 - 1e-12, 1e-12, 1e-12, 0.5, 0.5], dtype=torch.float64)
    exact = [Fraction(x) for x in pi.tolist()]
    for drawn in [(), (0,), (4,), (0, 1), (0, 4)]:
        left, e = 3 - len(drawn), sum((1 - exact[i] for i in drawn), Fraction(0))
        actual = brewer_weights(1 - pi, torch.tensor([[float(e)]], dtype=torch.float64), left)[0]
        for i in set(range(6)) - set(drawn):
            expected = (left - 1 + e + 1 - exact[i]) / (e + left * (1 - exact[i]))
            assert float(actual[i]) == pytest.approx(float(expected), rel=1e-15)


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
def test_supports_are_those_of_the_published_splitting_and_of_all_starts(parts):
    pi, probs = [part * STEP for part in parts], torch.tensor(parts, dtype=torch.float64) / 64
    assert law_of(minimum_support(probs)) == minimum_support_by_splitting(pi, int(sum(pi)))
    assert law_of(systematic_support(probs)) == systematic_by_stepping(pi, tuple(range(len(pi))), STEP)


@pytest.mark.parametrize("parts", CASES)
def test_draws_from_a_list_have_its_law(parts):
    pi = torch.tensor(parts, dtype=torch.float64) / 64
    generator = torch.Generator().manual_seed(0)
    support = minimum_support(pi)
    assert excess(draw_from_support(support, 10_000, generator), law_of(support)) <= 1
    assert excess(Systematic().sample(pi, 10_000, generator), law_of(systematic_support(pi))) <= 1


@pytest.mark.slow
def test_shuffled_systematic_draws_have_the_law_averaged_over_all_orders():
    parts = [60, 50, 40, 20, 16, 6]
    pi, law = [part * STEP for part in parts], {}
    orders = list(itertools.permutations(range(6)))
    for order in orders:
        for terms, p in systematic_by_stepping(pi, order, 2 * STEP).items():
            law[terms] = law.get(terms, Fraction(0)) + p / len(orders)
    probs = torch.tensor(parts, dtype=torch.float64) / 64
    assert excess(RandomSystematic().sample(probs, 20_000, torch.Generator().manual_seed(1)), law) <= 1
    # Negative control: without shuffling the same sets come up, at most six of them, far too often.
    assert excess(Systematic().sample(probs, 20_000, torch.Generator().manual_seed(1)), law) > 1


@settings(deadline=None, max_examples=30)
@given(spectra, st.data())
def test_supports_hold_at_most_n_samples_with_the_given_probabilities(values, data):
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
def test_supports_handle_4096_terms(n):
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


PI = torch.full((10,), 0.4)
CHUNKED: dict[str, Callable[[int, torch.Generator], Tensor]] = {
    "conditional Poisson": lambda size, generator: draw_conditional_poisson(working_open_terms(PI, 4), size, generator),
    "successive": lambda size, generator: draw_successive(torch.zeros(10), 4, size, generator),
    "Brewer": lambda size, generator: draw_brewer(open_terms(PI), size, generator),
    "shuffled systematic": lambda size, generator: RandomSystematic().sample(PI, size, generator),
}
OTHERS = {
    "systematic": lambda size, generator: Systematic().sample(PI, size, generator),
    "from a list": lambda size, generator: draw_from_support(minimum_support(PI), size, generator),
}


@pytest.mark.parametrize("chunk", [1, 25])
@pytest.mark.parametrize("draw", CHUNKED.values(), ids=CHUNKED)
def test_draws_in_chunks_are_complete(draw, chunk, monkeypatch):
    for module in ("open_terms", "conditional_poisson"):
        monkeypatch.setattr(f"lightning_spectral.functional.sampling.{module}.CHUNK", chunk)
    draws = draw(7, torch.Generator().manual_seed(0))
    assert draws.shape == (7, 4)
    assert (draws.diff(dim=1) > 0).all()
    assert len(set(map(tuple, draws.tolist()))) > 1


@pytest.mark.parametrize("draw", [*CHUNKED.values(), *OTHERS.values()], ids=[*CHUNKED, *OTHERS])
def test_no_samples_is_an_error(draw):
    with pytest.raises(ValueError, match="`num_samples` must be at least 1, got 0"):
        draw(0, torch.Generator())
