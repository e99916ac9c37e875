"""Every design keeps the contract, and designs that break a rule are caught."""

import re
from collections.abc import Callable, Sequence
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
    Prepared,
    RandomSystematic,
    SuccessiveSampling,
    Systematic,
)
from lightning_spectral.functional import draw_conditional_poisson, draw_successive, successive_inclusion_probs
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
    draws = fitted.draw(4000, torch.Generator().manual_seed(0))
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
        return Prepared(self.draw, self.fit_to(inclusion_probs))


def seeds_itself(inner: FittedDesign, size: int, generator: torch.Generator) -> Tensor:
    generator.seed()
    return inner.draw(size, generator)


def call_draw(inner: FittedDesign, size: int, generator: torch.Generator) -> Tensor:
    return inner.draw(size, generator)


def choice_sizes(probs: Tensor) -> Tensor:
    return torch.where(probs == 1, torch.inf, probs.log())


def num_terms(probs: Tensor) -> int:
    return round(float(probs.sum()))


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


@pytest.mark.parametrize(
    ("design", "message"),
    [
        # inclusion probabilities as working probabilities; numpy.random.choice(replace=False, p=inclusion_probs / n)
        (Broken(call_draw, lambda pi: Prepared(draw_conditional_poisson, pi, num_terms(pi))), "has frequency"),
        (Broken(call_draw, lambda pi: Prepared(draw_successive, choice_sizes(pi), num_terms(pi))), "has frequency"),
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
