"""Every design keeps the contract, and designs that break a rule are caught."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_spectral.designs import (
    Brewer,
    ConditionalPoisson,
    Design,
    FittedDesign,
    MinimumSupport,
    RandomSystematic,
    SuccessiveSampling,
    Systematic,
)
from lightning_spectral.designs.fixed_size import FittedConditionalPoisson, FittedSuccessiveSampling
from lightning_spectral.functional import successive_inclusion_probs
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.testing import check_design

DESIGNS = [
    ConditionalPoisson(),
    SuccessiveSampling(),
    Brewer(),
    MinimumSupport(),
    Systematic(),
    RandomSystematic(),
]


@pytest.mark.parametrize("design", DESIGNS, ids=repr)
def test_design_keeps_the_contract(design):
    check_design(design)


def test_known_sizes_are_used_and_their_count_is_checked():
    log_sizes = torch.tensor([2.0, 1.0, 0.0, -torch.inf], dtype=torch.float64)
    probs = successive_inclusion_probs(log_sizes, 2)
    design = SuccessiveSampling(log_sizes)
    fitted = design.fit(probs)
    assert torch.equal(fitted.log_sizes, log_sizes)
    draws = fitted.draw(4000, torch.Generator().manual_seed(0))
    frequencies = torch.bincount(draws.flatten(), minlength=4) / 4000
    assert ((frequencies - probs).abs() <= 5 * (probs * (1 - probs) / 4000).sqrt()).all()
    with pytest.raises(ValueError, match="this design's 4 sizes, got 2 entries"):
        design.fit(torch.tensor([0.5, 0.5]))


# Designs that break one rule each: negative controls of check_design.


@dataclass(frozen=True)
class Unfitted(Design):
    """Uses the inclusion probabilities as the working probabilities."""

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        probs, num_terms = as_inclusion_probs(inclusion_probs)
        return FittedConditionalPoisson(probs, num_terms)


@dataclass(frozen=True)
class Choice(Design):
    """numpy.random.choice(replace=False, p=inclusion_probs / n)."""

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        probs, num_terms = as_inclusion_probs(inclusion_probs)
        return FittedSuccessiveSampling(torch.where(probs == 1, torch.inf, probs.log()), num_terms)


@dataclass(frozen=True)
class Broken(Design):
    """Conditional Poisson sampling with a mistake in what it returns."""

    mistake: str

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        return BrokenDraws(self.mistake, ConditionalPoisson().fit(inclusion_probs))


@dataclass(frozen=True)
class BrokenDraws(FittedDesign):
    mistake: str
    inner: FittedDesign

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        draws = self.inner.draw(num_samples, generator)
        if self.mistake == "repeats every row":
            return draws[::2].repeat_interleave(2, dim=0)[:num_samples]
        if self.mistake == "unsorted":
            return draws.flip(1)
        if self.mistake == "int32":
            return draws.int()
        if self.mistake == "one too few":
            return draws[:, 1:]
        if self.mistake == "own generator":
            return self.inner.draw(num_samples, torch.Generator().manual_seed(0))
        generator.seed()
        return self.inner.draw(num_samples, generator)


@dataclass(frozen=True)
class Unchecked(ConditionalPoisson):
    """Normalises bad input instead of refusing it."""

    def fit(self, inclusion_probs: Tensor) -> FittedConditionalPoisson:
        total = inclusion_probs.sum()
        return super().fit(inclusion_probs / total * total.round().clamp_min(1))


@dataclass(frozen=True)
class Swapped(ConditionalPoisson):
    """Fits several vectors in another order."""

    def fit_all(self, inclusion_probs: Sequence[Tensor]) -> list[FittedDesign]:
        return super().fit_all(inclusion_probs)[::-1]


@pytest.mark.parametrize(
    ("design", "message"),
    [
        (Unfitted(), "has frequency"),
        (Choice(), "has frequency"),
        (Broken("repeats every row"), "consecutive samples are correlated"),
        (Broken("unsorted"), "not sorted and distinct"),
        (Broken("int32"), "dtype torch.int32"),
        (Broken("one too few"), r"not \(4000, 3\)"),
        (Broken("own generator"), "does not depend on the generator"),
        (Broken("seeds itself"), "differ from sample"),
        (Swapped(), "`fit_all` draws differently"),
        (Unchecked(), "although their sum 1.5 is not whole"),
    ],
    ids=repr,
)
def test_a_design_that_breaks_a_rule_is_caught(design, message):
    with pytest.raises(AssertionError, match=message) as error:
        check_design(design)
    assert re.search(type(design).__name__, str(error.value))
