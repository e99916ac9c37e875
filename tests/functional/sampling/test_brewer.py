"""Brewer's method against the law of its published formula, subset by subset."""

import numpy as np
import pytest
import torch

from lightning_spectral.functional import draw_brewer

PROBS = {
    "steep": [0.9, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05, 0.05],
    "nearly certain": [0.999, 0.99, 0.9, 0.5, 0.4, 0.2, 0.01, 0.001],
    "ties": [0.5] * 10,
    "half, twelve": [0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.4, 0.3, 0.2, 0.15, 0.1, 0.05],
    "one of five": [0.5, 0.3, 0.1, 0.06, 0.04],
    "all but one": [0.99, 0.9, 0.7, 0.41],
}


def law_by_enumeration(pi: np.ndarray, n: int) -> dict[frozenset[int], float]:
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
    return law


@pytest.mark.parametrize("name", PROBS)
def test_the_published_formula_has_the_given_inclusion_probabilities(name):
    pi = np.array(PROBS[name])
    law = law_by_enumeration(pi, round(pi.sum()))
    marginals = sum(p * np.isin(range(len(pi)), list(terms)) for terms, p in law.items())
    np.testing.assert_allclose(marginals, pi, atol=1e-13, rtol=0)


def deviations(draws: torch.Tensor, law: dict[frozenset[int], float]) -> float:
    """Largest deviation of a subset's frequency in units of what chance allows."""
    size = len(draws)
    keys, counts = np.unique((2**draws).sum(1).numpy(), return_counts=True)
    frequency = dict(zip(keys.tolist(), (counts / size).tolist(), strict=True))
    return max(
        abs(frequency.get(sum(2**i for i in terms), 0.0) - p) / (5 * np.sqrt(p * (1 - p) / size) + 1 / size)
        for terms, p in law.items()
    )


@pytest.mark.parametrize("name", PROBS)
def test_draws_have_the_enumerated_joint_law(name):
    pi = np.array(PROBS[name])
    draws = draw_brewer(torch.tensor(pi), 40_000, torch.Generator().manual_seed(0))
    assert deviations(draws, law_by_enumeration(pi, round(pi.sum()))) <= 1


def test_draws_without_the_correction_are_detected():
    """The negative control: draws one by one in proportion to the inclusion probabilities."""
    pi = np.array(PROBS["steep"])
    draws = torch.tensor(pi).expand(40_000, -1).multinomial(3, generator=torch.Generator().manual_seed(0))
    assert deviations(draws, law_by_enumeration(pi, 3)) > 1


def test_certain_and_impossible_terms_do_not_affect_the_other_terms():
    pi = torch.tensor([1.0, 0.9, 0.0, 0.7, 0.4, 1.0], dtype=torch.float64)
    with_them = draw_brewer(pi, 100, torch.Generator().manual_seed(0))
    without = draw_brewer(pi[[1, 3, 4]], 100, torch.Generator().manual_seed(0))
    assert (with_them[:, [0, -1]] == torch.tensor([0, 5])).all()
    assert torch.equal(with_them[:, 1:-1], torch.tensor([1, 3, 4])[without])


def test_entries_a_trillionth_from_zero_and_one_keep_full_precision():
    """Weights of all terms at every first and second draw, against exact rational numbers."""
    from fractions import Fraction

    from lightning_spectral.functional.sampling.without_fit import brewer_weights

    pi = torch.tensor([1 - 1e-12, 1 - 1e-12, 1e-12, 1e-12, 0.5, 0.5], dtype=torch.float64)
    exact = [Fraction(x) for x in pi.tolist()]
    for drawn in [(), (0,), (4,), (0, 1), (0, 4)]:
        left, e = 3 - len(drawn), sum((1 - exact[i] for i in drawn), Fraction(0))
        actual = brewer_weights(1 - pi, torch.tensor([[float(e)]], dtype=torch.float64), left)[0]
        for i in set(range(6)) - set(drawn):
            expected = (left - 1 + e + 1 - exact[i]) / (e + left * (1 - exact[i]))
            assert float(actual[i]) == pytest.approx(float(expected), rel=1e-15)
