"""Table-driven conditional Poisson sampling: its exact law, its marginals, its fixed number of uniforms."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_spectral.functional import (
    collective_inclusion_probs,
    draw_from_table,
    fit_conditional_poisson,
    proportional_inclusion_probs,
    selection_table,
)
from lightning_spectral.functional.sampling.poisson_binomial import centred_logits
from lightning_spectral.functional.sampling.selection_table import SelectionTable


def implied_inclusion_probs(table: SelectionTable) -> np.ndarray:
    """Follow the probability of every number of places left through the table, forwards."""
    n = table.parts.num_terms
    pi = np.zeros(table.num_total)
    pi[table.parts.certain] = 1
    state = np.eye(n + 1)[n]  # P(r places left)
    for term, probs, lowest in zip(table.parts.undecided.tolist(), table.probs, table.lowest.tolist(), strict=True):
        q = np.zeros(n + 1)
        inside = min(len(probs), n + 1 - lowest)
        q[lowest : lowest + inside] = probs[:inside]
        assert state[:lowest].sum() + state[lowest + inside :].sum() < 1e-15  # nothing leaves the band
        taken = state * q
        pi[term] = taken.sum()
        state = state - taken + np.append(taken[1:], 0)
    assert state[0] == pytest.approx(1, abs=1e-12)
    return pi


def table_for(pi: Tensor) -> SelectionTable:
    return selection_table(fit_conditional_poisson(pi), round(float(pi.sum())))


@pytest.mark.parametrize(("N", "n"), [(2, 1), (6, 5), (8, 3), (12, 6)])
def test_every_subset_has_its_conditional_poisson_probability(N, n):
    p = torch.rand(N, generator=torch.Generator().manual_seed(N), dtype=torch.float64)
    table = selection_table(p, n)
    rows = [np.isin(range(N), chosen) for chosen in itertools.combinations(range(N), n)]
    weights = np.array([np.where(row, p, 1 - p).prod() for row in rows])
    for row, expected in zip(rows, weights / weights.sum(), strict=True):
        left, probability = n, 1.0
        for k, taken in enumerate(row):
            q = table.probs[k, left - table.lowest[k]]
            probability *= q if taken else 1 - q
            left -= taken
        assert probability == pytest.approx(expected, rel=1e-12)


def adversarial_designs():
    rng = np.random.default_rng(0)
    for k in range(120):
        N = int(rng.integers(2, 60))
        extreme = 10.0 ** rng.uniform(-12, 0, N) * 0.999
        pi = [
            np.where(rng.random(N) < 0.5, extreme, 1 - extreme),
            rng.choice([1e-12, 0.5, 1 - 1e-12], N),
            rng.choice([1e-12, 1 - 1e-12, 3e-12], N),
            np.sort(rng.random(N)),
        ][k % 4]
        n = min(max(round(float(pi.sum())), 1), N - 1)
        yield torch.sigmoid(centred_logits(torch.logit(torch.tensor(pi)), n))


def test_marginals_hold_to_1e_12_on_adversarial_designs():
    for pi in adversarial_designs():
        np.testing.assert_allclose(implied_inclusion_probs(table_for(pi)), pi, atol=1e-12, rtol=0)


spectra = st.lists(
    st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0]), st.floats(-15, 0).map(lambda e: 10.0**e)),
    min_size=2,
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(spectra, st.data())
def test_marginals_hold_for_any_spectrum(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    s = torch.tensor(values, dtype=torch.float64)
    for pi in (proportional_inclusion_probs(s, n), collective_inclusion_probs(s, n, 10)):
        np.testing.assert_allclose(implied_inclusion_probs(table_for(pi)), pi, atol=1e-12, rtol=0)


def gap(large: int, small: int) -> Tensor:
    return torch.cat([torch.full((large,), 1e6), torch.full((small,), 1.0)]).double()


@pytest.mark.parametrize(
    ("s", "n"),
    [
        (torch.linspace(3, 1, 4096, dtype=torch.float64), 2048),
        (torch.ones(4096, dtype=torch.float64), 2048),
        (1 / torch.arange(1, 4097, dtype=torch.float64), 410),
        (torch.ones(1100, dtype=torch.float64), 550),  # raw elementary symmetric sums overflow here
        (gap(210, 302), 205),  # these two underflow in R
        (gap(104, 408), 103),
        (gap(2048, 2048), 2048),
    ],
)
def test_large_tables_keep_the_marginals_in_a_narrow_band(s, n):
    pi = proportional_inclusion_probs(s, n)
    table = table_for(pi)
    np.testing.assert_allclose(implied_inclusion_probs(table), pi, atol=1e-12, rtol=0)
    assert table.probs.nbytes < 16e6
    draws = draw_from_table(table, 3, torch.Generator().manual_seed(0))
    assert draws.shape == (3, n)
    assert (draws.diff(dim=1) > 0).all()


def test_a_table_filled_by_fourier_transform_would_be_wrong_in_its_tails():
    """The negative control of the all-positive recursion: 8 standard deviations from the mean, no digit is correct."""
    p = np.full(300, 0.5)
    exact = np.ones(1)
    for x in p:
        exact = np.convolve(exact, [1 - x, x])
    theta = 2 * np.pi / 301 * np.arange(301)
    fourier = np.fft.fft(np.prod(1 - p + p * np.exp(1j * theta)[:, None], axis=1)).real / 301
    assert abs(fourier[75] / exact[75] - 1) > 0.01


PI = torch.tensor([1.0, 0.9, 0.0, 0.7, 0.6, 0.4, 0.3, 0.1], dtype=torch.float64)


def test_every_sample_uses_exactly_n_uniforms():
    table, generator, other = table_for(PI), torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    one_by_one = torch.cat([draw_from_table(table, 1, generator) for _ in range(20)])
    assert torch.equal(draw_from_table(table, 20, torch.Generator().manual_seed(0)), one_by_one)
    torch.rand(20, len(PI), generator=other, dtype=torch.float64)
    assert torch.equal(generator.get_state(), other.get_state())


def test_nearly_equal_designs_make_nearly_the_same_choices():
    """Common random numbers: the same uniforms, designs 1 % apart."""
    s = 1 / torch.arange(1, 65, dtype=torch.float64)
    a, b = (proportional_inclusion_probs(s**power, 13) for power in (1.0, 1.01))
    draws = [draw_from_table(table_for(pi), 200, torch.Generator().manual_seed(0)) for pi in (a, b)]
    same = torch.zeros(2, 200, 64).scatter_(2, torch.stack(draws), 1.0).prod(0).sum(1).mean()
    independent = float((a * b).sum())
    assert same > 12.5
    assert independent < 7.5


def test_designs_without_choice_and_bad_input():
    table = table_for(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    assert draw_from_table(table, 2, torch.Generator()).tolist() == [[1, 2], [1, 2]]
    with pytest.raises(ValueError, match="`num_samples` must be at least 1, got 0"):
        draw_from_table(table, 0, torch.Generator())
    with pytest.raises(ValueError, match=r"number of ones \(0\) and of positive entries \(1\).*got 2"):
        selection_table(torch.tensor([0.5, 0.0, 0.0]), 2)
