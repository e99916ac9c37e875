"""Designs: the contract, draws against each design's own covariance, and a federation of two rounds."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_laws import spectra
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.designs import (
    Brewer,
    ConditionalPoisson,
    Design,
    FittedDesign,
    JointDesign,
    MinimumSupport,
    RandomSystematic,
    SuccessiveSampling,
    Systematic,
)
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.conditional_poisson import draw_conditional_poisson, working_open_terms
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, proportional_inclusion_probs
from lightning_spectral.functional.sampling.successive_sampling import draw_successive, successive_inclusion_probs
from lightning_spectral.testing import check_design
from lightning_spectral.testing.choices import check_rows

DESIGNS = [ConditionalPoisson(), SuccessiveSampling(), Brewer(), MinimumSupport(), Systematic(), RandomSystematic()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
def test_design_keeps_the_contract(design):
    check_design(design)


def test_known_sizes_are_used_and_their_count_is_checked():
    log_sizes = torch.tensor([2.0, 1.0, 0.0, -torch.inf], dtype=torch.float64)
    probs = successive_inclusion_probs(log_sizes, 2)
    design = SuccessiveSampling(log_sizes)
    draws = design.fit(probs).draw(4000, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(draws.flatten(), minlength=4) / 4000
    assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / 4000).sqrt()).all()
    with pytest.raises(ValueError, match="this design's 4 sizes, got 2 entries"):
        design.fit(torch.tensor([0.5, 0.5]))


# Designs that break one rule each: negative controls of check_design.


@dataclass(frozen=True)
class Broken(Design):
    """Fits and draws with functions that the test provides."""

    draw: Callable[[FittedDesign, int, torch.Generator], Tensor]
    fit_to: Callable[[Tensor], FittedDesign] = ConditionalPoisson().fit

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        as_inclusion_probs(inclusion_probs)
        return FittedDesign(self.draw, self.fit_to(inclusion_probs))


def seeds_itself(inner: FittedDesign, size: int, generator: torch.Generator) -> Tensor:
    generator.seed()
    return inner.draw(size, generator)


def num_terms(probs: Tensor) -> int:
    return round(float(probs.sum()))


def as_by_choice(probs: Tensor) -> FittedDesign:
    return FittedDesign(draw_successive, torch.where(probs == 1, torch.inf, probs.log()), num_terms(probs))


def unfitted(probs: Tensor) -> FittedDesign:
    return FittedDesign(draw_conditional_poisson, working_open_terms(probs, num_terms(probs)))


@dataclass(frozen=True)
class Unchecked(ConditionalPoisson):
    """Normalises bad input instead of refusing it."""

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        total = inclusion_probs.sum()
        return super().fit(inclusion_probs / total * total.round().clamp_min(1))


@dataclass(frozen=True)
class Swapped(ConditionalPoisson):
    """Fits several vectors in another order."""

    def fit_all(self, inclusion_probs: Sequence[Tensor]) -> list[FittedDesign]:
        return super().fit_all(inclusion_probs)[::-1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("design", "message"),
    [
        # inclusion probabilities as working probabilities; numpy.random.choice(replace=False, p=inclusion_probs / n)
        (Broken(FittedDesign.draw, unfitted), "has frequency"),
        (Broken(FittedDesign.draw, as_by_choice), "has frequency"),
        (Broken(lambda inner, k, g: inner.draw(k, g)[::2].repeat_interleave(2, dim=0)[:k]), "samples are correlated"),
        (Broken(lambda inner, k, g: inner.draw(k, g).flip(1)), "not sorted and distinct"),
        (Broken(lambda inner, k, g: inner.draw(k, g).int()), "dtype torch.int32"),
        (Broken(lambda inner, k, g: inner.draw(k, g)[:, 1:]), r"not \(4000, 3\)"),
        (Broken(lambda inner, k, g: inner.draw(k, torch.Generator())), "does not depend on the generator"),
        (Broken(seeds_itself), "differ from sample"),
        (Swapped(), "`fit_all` draws differently"),
        (Unchecked(), "although their sum 1.5 is not whole"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_design_that_breaks_a_rule_is_caught(design, message):
    with pytest.raises(AssertionError, match=message) as error:
        check_design(design)
    assert re.search(type(design).__name__, str(error.value))


KNOWN = [ConditionalPoisson(), SuccessiveSampling(), MinimumSupport(), Systematic()]
QUICK = [Brewer(), RandomSystematic(), *KNOWN[:1], *KNOWN[2:]]
S = 1 / torch.arange(1, 301, dtype=torch.float64).sqrt()
SPECTRA = {
    "slow decay": proportional_inclusion_probs(S, 60),
    "collective": collective_inclusion_probs(S, 120, 10),
    "gap": proportional_inclusion_probs(torch.cat([5 * S[:40], S]), 70),
}
SIZE = 20_000


def indicators(draws: Tensor, num_total: int) -> Tensor:
    return torch.zeros(len(draws), num_total, dtype=torch.float64).scatter_(1, draws, 1.0)


def surprise(draws: Tensor, pi: Tensor, joint: Tensor) -> float:
    """Squared length of the deviation of the frequencies, in standard deviations above its mean.

    In units of the design's own covariance it is chi-squared, with one degree of freedom per direction left to chance.
    Directions with a variance below 1e-3, where 20,000 samples are not yet normal, are left out.
    """
    variances, directions = torch.linalg.eigh(joint - torch.outer(pi, pi))
    tested = variances > 1e-3
    frequencies = torch.bincount(draws.flatten(), minlength=len(pi)).double() / len(draws)
    deviation = (frequencies - pi) @ directions[:, tested]
    freedom = int(tested.sum())
    assert freedom >= 10
    return float(len(draws) * (deviation**2 / variances[tested]).sum() - freedom) / math.sqrt(2 * freedom)


def pair_excess(draws: Tensor, joint: Tensor) -> float:
    """Largest deviation of a pair's frequency in units of what chance allows."""
    drawn = indicators(draws, len(joint))
    frequency = drawn.T @ drawn / len(draws)
    bound = 5 * (joint * (1 - joint)).clamp_min(0).div(len(draws)).sqrt() + 1 / len(draws)
    return float(((frequency - joint).abs() / bound).max())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spectrum", ["collective", "gap"])
@pytest.mark.parametrize("design", KNOWN, ids=repr)
def test_draws_have_the_joint_probabilities_of_their_design(design, spectrum):
    pi = SPECTRA[spectrum]
    joint = design.joint_inclusion_probs(pi)
    torch.testing.assert_close(joint.diagonal(), pi, rtol=0, atol=1e-10)
    torch.testing.assert_close(joint.sum(1), round(float(pi.sum())) * pi, rtol=0, atol=1e-8)
    draws = design.sample(pi, SIZE, torch.Generator().manual_seed(0))
    assert surprise(draws, pi, joint) <= 5
    assert pair_excess(draws, joint) <= 1


@pytest.mark.slow
def test_choice_and_samples_used_twice_are_detected():
    pi = SPECTRA["gap"]
    joint = ConditionalPoisson().joint_inclusion_probs(pi)
    log_sizes = torch.where(pi == 1, torch.inf, pi.log())
    choice = FittedDesign(draw_successive, log_sizes, round(float(pi.sum())))  # numpy.random.choice with p = pi / n
    assert surprise(choice.draw(SIZE, torch.Generator().manual_seed(0)), pi, joint) > 5
    once = ConditionalPoisson().sample(pi, SIZE, torch.Generator().manual_seed(0))
    assert surprise(once, pi, joint) <= 5
    assert surprise(once.repeat(2, 1), pi, joint) > 5


def test_unfitted_odds_are_detected():
    """Inclusion probabilities used as working probabilities: a small error, so fewer terms and more samples."""
    n = 7
    pi = proportional_inclusion_probs(S[:32], n)
    joint = ConditionalPoisson().joint_inclusion_probs(pi)
    draws = draw_conditional_poisson(working_open_terms(pi, n), 5 * SIZE, torch.Generator().manual_seed(0))
    assert surprise(draws, pi, joint) > 5
    draws = ConditionalPoisson().sample(pi, 5 * SIZE, torch.Generator().manual_seed(0))
    assert surprise(draws, pi, joint) <= 5


@pytest.mark.parametrize("design", KNOWN[2:], ids=repr)
def test_designs_with_few_samples_are_far_from_the_most_random_one(design):
    """The pair test distinguishes designs with equal marginals."""
    pi = SPECTRA["slow decay"]
    draws = design.sample(pi, SIZE, torch.Generator().manual_seed(0))
    assert pair_excess(draws, ConditionalPoisson().joint_inclusion_probs(pi)) > 10


@pytest.mark.slow
def test_random_systematic_and_brewer_are_close_to_the_most_random_one():
    pi = SPECTRA["slow decay"]
    joint = ConditionalPoisson().joint_inclusion_probs(pi)
    for design in (RandomSystematic(), Brewer()):
        assert pair_excess(design.sample(pi, SIZE // 4, torch.Generator().manual_seed(0)), joint) < 2


def check_draws(design: Design, pi: Tensor, num_samples: int = 3) -> None:
    """Exact size, sorted and distinct; ones always, zeros never."""
    draws = design.sample(pi, num_samples, torch.Generator().manual_seed(0))
    check_rows(draws, pi, num_samples, repr(design))
    drawn = indicators(draws, len(pi))
    assert (drawn[:, pi == 1] == 1).all()
    assert (drawn[:, pi == 0] == 0).all()


@settings(deadline=None, max_examples=20)
@given(spectra, st.data())
def test_every_design_draws_from_any_spectrum(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    s = torch.tensor(values, dtype=torch.float64)
    for pi in (proportional_inclusion_probs(s, n), collective_inclusion_probs(s, n, 10)):
        for design in QUICK:
            check_draws(design, pi)


@settings(deadline=None, max_examples=12)
@given(spectra, st.data())
def test_successive_sampling_draws_from_any_spectrum(values, data):
    n = data.draw(st.integers(1, len(values) - 1))
    check_draws(SuccessiveSampling(), proportional_inclusion_probs(torch.tensor(values, dtype=torch.float64), n))


def large(kind: str) -> Tensor:
    if kind == "half of 4096":
        return proportional_inclusion_probs(torch.linspace(3, 1, 4096, dtype=torch.float64), 2048)
    if kind == "a trillionth from 0 and 1":
        edge = torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64).repeat(1024)
        return torch.cat([edge, torch.full((2048,), 0.5, dtype=torch.float64)])
    sizes = {"gap, 205 of 512": (210, 302), "gap, 103 of 512": (104, 408)}[kind]
    values = torch.cat([torch.full((sizes[0],), 1e6), torch.ones(sizes[1])]).double()
    return proportional_inclusion_probs(values, int(kind.split()[1]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "kind", ["half of 4096", "a trillionth from 0 and 1", "gap, 205 of 512", "gap, 103 of 512"]
)  # R's UPmaxentropy returns NaN or an error for all four
@pytest.mark.parametrize("design", [*QUICK, SuccessiveSampling()], ids=repr)
def test_designs_handle_extreme_sizes_and_gaps(design, kind):
    check_draws(design, large(kind), num_samples=2)


@pytest.mark.parametrize("design", [*QUICK, SuccessiveSampling()], ids=repr)
def test_only_designs_with_known_joint_probabilities_offer_them(design):
    assert isinstance(design, JointDesign) == hasattr(design, "joint_inclusion_probs")
    assert isinstance(design, JointDesign) != isinstance(design, (Brewer, RandomSystematic))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("design", DESIGNS, ids=repr)
def test_every_design_trains_for_two_rounds(design, lit, data, fit):
    before = [parameter.detach().clone() for parameter in lit.parameters()]
    algorithm = ls.SpectralSharding(ls.Collective(), keep_ratio=0.4, design=design)
    history = fit(lit, data, algorithm=algorithm, clients_per_round=3, max_epochs=2).history
    assert len(history.rows) == 2
    assert all(math.isfinite(value) for value in history.column("train_loss"))
    assert any(not before_.equal(after) for before_, after in zip(before, lit.parameters(), strict=True))
