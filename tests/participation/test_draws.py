"""Draws: frequencies, sizes, random numbers used, and variances by simulation."""

import itertools
import math

import pytest
import torch
from populations import GAPS, MIXED, some_figures
from torch import Tensor

from lightning_spectral.designs import Brewer, ConditionalPoisson, Design, Systematic
from lightning_spectral.functional import step_size_variance
from lightning_spectral.participation import LossVarianceReduced, Population, Sampler, Uniform, UniformParticipation
from lightning_spectral.participation.sampler import draw_choices, processor_joint_probs

PROBS = LossVarianceReduced(active=2).probs(
    torch.tensor([[6.0, 2.0, 1.0], [0.0, 1.0, 1.5], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.5, 0.5, 1.0]])
)


def num_draws(design: Design | None) -> int:
    """The number of draws that takes half a second; designs are fitted for every draw."""
    return 2000 if design is None else 300 if isinstance(design, ConditionalPoisson) else 800


def deviation(frequencies: Tensor, probs: Tensor, num_samples: int) -> float:
    """Largest deviation in standard errors; infinite if something impossible happens or something certain does not."""
    errors = (probs * (1 - probs) / num_samples).sqrt()
    distances = (frequencies - probs).abs()
    return float(torch.where(distances < 1e-12, 0.0, distances / errors).max())


@pytest.mark.parametrize(
    "design", [None, ConditionalPoisson(), Systematic(), Brewer()], ids=lambda design: type(design).__name__
)
def test_models_are_drawn_as_often_as_they_should(design: Design | None) -> None:
    num_samples, generator = num_draws(design), torch.Generator().manual_seed(0)
    counts = torch.zeros_like(PROBS)
    for _ in range(num_samples):
        choice, order = draw_choices(PROBS, design, generator)
        assert design is None or len(order) == 2
        assert sorted(order.tolist()) == (choice >= 0).nonzero()[:, 0].tolist()
        counts[order, choice[order]] += 1
    frequencies = counts / num_samples
    assert deviation(frequencies, PROBS, num_samples) <= 5.0
    assert deviation(frequencies.sum(1), PROBS.sum(1), num_samples) <= 5.0
    assert deviation(frequencies, PROBS.flip(1), num_samples) > 10.0


@pytest.mark.parametrize("row", [[0.1] * 10, [1 / 3] * 3, [0.7, 0.2, 0.1], [0.0, 1.0, 0.0]])
def test_certain_processors_are_always_drawn_and_nobody_draws_what_is_impossible(row: list[float]) -> None:
    probs = torch.tensor([row], dtype=torch.float64)
    for extreme in (0.0, 1 - 2**-53):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "rand", lambda *size, u=extreme, **_: torch.full(size, u, dtype=torch.float64))
            for design in (None, Systematic()):
                choice, order = draw_choices(probs, design, torch.Generator())
                assert order.tolist() == [0]
                assert float(probs[0, choice[0]]) > 0


def test_draws_use_one_number_for_each_processor_or_those_of_the_design() -> None:
    ours, plain = (torch.Generator().manual_seed(5) for _ in range(2))
    draw_choices(PROBS, None, ours)
    torch.rand(5, dtype=torch.float64, generator=plain)
    assert torch.equal(ours.get_state(), plain.get_state())
    rows = PROBS.sum(1)
    _, order = draw_choices(rows[:, None], ConditionalPoisson(), ours)
    assert torch.equal(order, ConditionalPoisson().sample(rows, 1, plain)[0])
    assert torch.equal(ours.get_state(), plain.get_state())


def test_equally_likely_processors_are_a_uniform_cohort_in_its_order() -> None:
    probs = Uniform(active=2).probs(GAPS.can.double())  # processor 1 cannot train
    for seed in range(20):
        ours, plain = (torch.Generator().manual_seed(seed) for _ in range(2))
        _, order = draw_choices(probs, Systematic(), ours)
        assert torch.equal(order, torch.tensor([0, 2, 3])[UniformParticipation(2).cohort(3, plain)])


def test_joint_probabilities_of_equally_likely_processors_are_those_of_simple_random_samples() -> None:
    probs = Uniform(active=2).probs(GAPS.can.double())
    able = [0, 2, 3]
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for pair in itertools.combinations(able, 2):
        trains = torch.zeros(4, dtype=torch.float64)
        trains[list(pair)] = 1
        expected += torch.outer(trains, trains) / 3
    for design in (Systematic(), Brewer()):  # whatever the design
        assert torch.allclose(processor_joint_probs(probs, design), expected, rtol=0, atol=1e-12)
    alone = processor_joint_probs(torch.ones(1, 1), Brewer())
    assert torch.equal(alone, torch.ones(1, 1, dtype=torch.float64))


def test_a_design_that_does_not_know_joint_probabilities_says_so() -> None:
    with pytest.raises(TypeError, match=r"Brewer\(\) does not know its joint probabilities; use a JointDesign"):
        processor_joint_probs(PROBS, Brewer())


@pytest.mark.parametrize(
    "sampler",
    [
        LossVarianceReduced(active=2),
        LossVarianceReduced(active=2, design=ConditionalPoisson()),
        LossVarianceReduced(active=2, design=Systematic()),
        Uniform(active=2, design=Systematic()),
    ],
    ids=lambda sampler: f"{type(sampler).__name__}-{type(sampler.design).__name__}",
)
@pytest.mark.parametrize("population", [MIXED, GAPS], ids=["mixed", "gaps"])
def test_step_sizes_vary_as_calculated(sampler: Sampler, population: Population) -> None:
    num_samples, generator = num_draws(sampler.design), torch.Generator().manual_seed(0)
    figures = some_figures(population)
    num_models = population.num_examples.shape[1]
    squares = torch.zeros(num_samples, num_models, dtype=torch.float64)
    for sample in squares:
        assignment = sampler.assign(population, figures, 0, generator)
        models = torch.tensor(assignment.models, dtype=torch.int64)
        sample.index_add_(0, models, torch.tensor(assignment.coefficients, dtype=torch.float64)).sub_(1).square_()
    for model in range(num_models):
        joint = sampler.joint_probs(assignment.probs, model)
        expected = step_size_variance(population.weights[:, model], assignment.probs[:, model], joint)
        error = float(squares[:, model].std()) / math.sqrt(num_samples)
        assert abs(float(squares[:, model].mean()) - expected) <= 5 * error + 1e-12
