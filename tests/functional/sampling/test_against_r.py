"""Numbers made with R's packages `sampling` and `BiasedUrn`; the fixture describes how."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_spectral.functional.sampling.conditional_poisson import (
    conditional_poisson_joint_probs,
    fit_conditional_poisson,
)
from lightning_spectral.functional.sampling.inclusion import proportional_inclusion_probs
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.successive_sampling import manly_inclusion_probs, successive_inclusion_probs
from lightning_spectral.functional.sampling.without_fit import draw_brewer, support_joint_probs, systematic_support

FIXTURE = json.loads((Path(__file__).parents[2] / "fixtures" / "r_designs.json").read_text())

pytestmark = pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: f"N={len(case['sizes'])}")


def numbers(case: dict[str, Any], name: str) -> Tensor:
    return torch.tensor(case[name], dtype=torch.float64)


def inclusion_probs(case: dict[str, Any]) -> Tensor:
    return proportional_inclusion_probs(numbers(case, "sizes"), case["num_terms"])


def close(actual: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def test_inclusion_probs_equal_inclusionprobabilities(case):
    close(inclusion_probs(case), numbers(case, "inclusion_probs"), 1e-14)


def test_working_odds_equal_upmepiktildefrompik_up_to_a_factor(case):
    logits = torch.logit(fit_conditional_poisson(inclusion_probs(case))[case["open"]])
    expected = torch.logit(numbers(case, "working_probs"))
    close(logits - logits.mean(), expected - expected.mean(), 1e-11)  # R stops at 1e-13, not at rounding


def test_joint_probs_equal_upmepik2frompikw(case):
    joint = conditional_poisson_joint_probs(fit_conditional_poisson(inclusion_probs(case)), case["num_terms"])
    close(joint[case["open"]][:, case["open"]], numbers(case, "joint_probs"), 1e-12)


def test_systematic_joint_probs_equal_upsystematicpi2(case):
    joint = support_joint_probs(systematic_support(inclusion_probs(case)), len(case["sizes"]))
    close(joint, numbers(case, "systematic_joint_probs"), 1e-14)


def test_brewer_pairs_are_as_frequent_as_those_of_upbrewer(case):
    """Two estimates of the same probability: five standard deviations of their difference, and one sample."""
    size, draws = case["brewer_draws"], 40_000
    samples = draw_brewer(open_terms(inclusion_probs(case)), draws, torch.Generator().manual_seed(0))
    drawn = torch.zeros(draws, len(case["sizes"]), dtype=torch.float64).scatter_(1, samples, 1.0)
    ours, theirs = drawn.T @ drawn / draws, numbers(case, "brewer_pair_counts") / size
    pooled = (ours * draws + theirs * size) / (draws + size)
    assert ((ours - theirs).abs() <= 5 * (pooled * (1 - pooled) * (1 / draws + 1 / size)).sqrt() + 1 / size).all()


def test_manly_and_exact_marginals_equal_meanmwnchypergeo(case):
    log_sizes = numbers(case, "sizes").log()
    close(manly_inclusion_probs(log_sizes, case["num_terms"]), numbers(case, "manly"), 1e-12)
    # BiasedUrn's enumeration is accurate to 1.5e-8.
    close(successive_inclusion_probs(log_sizes, case["num_terms"]), numbers(case, "wallenius"), 2e-8)
