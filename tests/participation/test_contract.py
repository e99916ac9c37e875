"""The contract test shipped for samplers, and samplers that must fail it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.participation import Assignment, Population, Sampler
from lightning_spectral.testing import check_sampler

OURS = [
    ls.Uniform(active=2),
    ls.Uniform(active=3, design=ls.ConditionalPoisson()),
    ls.Uniform(active=2, normalize=True),
    ls.RoundRobin(active=1.5),
    ls.LossVarianceReduced(active=2.5),
    ls.UpdateVarianceReduced(active=2, design=ls.ConditionalPoisson()),
    ls.StaleUpdateVarianceReduced(active=1, measure="last"),
]


@pytest.mark.parametrize("sampler", OURS, ids=repr)
def test_our_samplers_keep_the_contract(sampler: Sampler) -> None:
    check_sampler(sampler, num_samples=100 if sampler.design else 300)  # designs are fitted for every draw


OTHER_SEEDS = itertools.count()


class WholeRows(ls.Uniform):
    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return super().probs(scores, round_idx) * (len(scores) / self.active)


class ForAnything(ls.Uniform):
    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        return torch.full_like(scores, self.active / scores.numel())


class Forgetful(ls.Uniform):
    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        return super().assign(population, figures, round_idx, torch.Generator().manual_seed(next(OTHER_SEEDS)))


class Biased(ls.Uniform):
    def long_run_probs(self, scores: Tensor, probs: Tensor) -> Tensor:
        return probs.clamp(max=0.25)


class FillsIn(ls.Uniform):
    """Writes zeros where figures are unknown."""

    def assign(
        self, population: Population, figures: Tensor | None, round_idx: int, generator: torch.Generator
    ) -> Assignment:
        assert figures is not None
        figures.nan_to_num_(0.0)
        return super().assign(population, figures, round_idx, generator)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (FillsIn(active=2), "the figures were changed in place"),
        (WholeRows(active=2), "sum"),
        (ForAnything(active=2), "cannot train"),
        (Forgetful(active=2), "the same generator drew"),
        (Biased(active=2), "not to 1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_breaks_it_is_found(sampler: Sampler, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_sampler(sampler, num_samples=300)
