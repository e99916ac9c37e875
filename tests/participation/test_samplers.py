"""Client samplers: unbiasedness by enumerating every possible draw; their probabilities, choices and refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from populations import DRAWN, GAPS, MIXED, ONE_MODEL, POPULATIONS, expected_average, random_values, some_figures
from torch import Tensor

from lightning_spectral.designs import ConditionalPoisson, Systematic
from lightning_spectral.participation import (
    FullParticipation,
    LossVarianceReduced,
    Population,
    RoundRobin,
    Sampler,
    StaleUpdateVarianceReduced,
    Uniform,
    UniformParticipation,
    UpdateVarianceReduced,
    outcome_to_assignment,
)


def distance(population: Population, found: Tensor, values: Tensor) -> float:
    return float((found - (population.shares * values).sum(0)).abs().max())


of_every_population = pytest.mark.parametrize("population", POPULATIONS, ids=["mixed", "gaps", "one model"])


@of_every_population
@pytest.mark.parametrize("sampler", DRAWN, ids=lambda sampler: type(sampler).__name__)
def test_the_average_is_unbiased(sampler: Sampler, population: Population) -> None:
    values = random_values(population)
    assert distance(population, expected_average(population, sampler, values), values) < 1e-12


def test_the_enumeration_notices_a_coefficient_that_forgets_the_number_of_processors() -> None:
    # n_i as if every client had one processor, although all its processors may be drawn
    wrong = Population(MIXED.num_examples * MIXED.processors[:, None], MIXED.processors)
    values = random_values(MIXED)
    assert distance(MIXED, expected_average(wrong, Uniform(active=1.5), values), values) > 0.01


@of_every_population
def test_round_robin_is_unbiased_over_a_cycle_but_not_in_one_round(population: Population) -> None:
    values = random_values(population)
    cycle = [expected_average(population, RoundRobin(active=1.5), values, round_idx) for round_idx in range(6)]
    assert distance(population, torch.stack(cycle).mean(0), values) < 1e-12
    if population is not ONE_MODEL:
        assert distance(population, cycle[0], values) > 0.01


def test_round_robin_takes_turns() -> None:
    scores = MIXED.can.double()  # processors 0, 1, 2 train three models, processor 3 models 0 and 2
    turns = [RoundRobin(active=4).probs(scores, round_idx).argmax(1).tolist() for round_idx in range(4)]
    assert turns == [[0, 1, 2, 2], [1, 2, 0, 0], [2, 0, 1, 2], [0, 1, 2, 0]]


@pytest.mark.parametrize("normalize", [False, True])
def test_full_participation_is_the_average_itself(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    sampler = FullParticipation(normalize=normalize)
    sampler.check(MIXED)
    assignment = sampler.assign(MIXED, None, 0, generator)
    pairs = list(zip(assignment.clients, assignment.models, strict=True))
    assert pairs == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2)]
    weights = MIXED.num_examples if normalize else MIXED.shares
    assert assignment.coefficients == [float(weights[pair]) for pair in pairs]
    assert assignment.active.tolist() == [4, 3, 4]
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("num_clients", [10, 100])
@pytest.mark.parametrize("active", [1, 3, 10])
def test_uniform_with_a_design_is_plain_federated_averaging(num_clients: int, active: int) -> None:
    num_examples = torch.randint(1, 10**6, (num_clients, 1), generator=torch.Generator().manual_seed(1))
    population = Population(num_examples, torch.ones(num_clients, dtype=torch.int64))
    for design in (Systematic(), ConditionalPoisson()):
        ours, plain = (torch.Generator().manual_seed(7) for _ in range(2))
        assignment = Uniform(active=active, design=design, normalize=True).assign(population, None, 3, ours)
        cohort = UniformParticipation(active).cohort(num_clients, plain)
        assert assignment.clients == cohort.tolist()
        assert assignment.coefficients == num_examples[cohort, 0].tolist()
        assert torch.equal(ours.get_state(), plain.get_state())


def test_normalized_coefficients_are_the_others_up_to_one_factor_per_model() -> None:
    sampler = LossVarianceReduced(active=2)
    probs = sampler.probs(sampler.scores(MIXED, some_figures(MIXED)))
    for choice in (torch.tensor([0, 0, 2, 0]), torch.tensor([2, 0, 2, 2]), torch.tensor([1, 1, -1, -1])):
        plain, normalized = (outcome_to_assignment(MIXED, probs, choice, normalize=flag) for flag in (False, True))
        assert (plain.clients, plain.models) == (normalized.clients, normalized.models)
        for model, first, second in zip(plain.models, plain.coefficients, normalized.coefficients, strict=True):
            factor = float(probs[:, model].max() * MIXED.num_examples[:, model].sum())
            assert abs(second / first / factor - 1) < 1e-14


def test_two_processors_of_a_client_train_a_model_once_with_both_coefficients() -> None:
    probs = torch.full((4, 3), 0.25, dtype=torch.float64)
    assignment = outcome_to_assignment(MIXED, probs, torch.tensor([2, 0, 2, -1]), order=torch.tensor([2, 1, 0]))
    assert (assignment.clients, assignment.models) == ([0, 0], [2, 0])
    d = MIXED.shares
    expected = [2 * float(d[0, 2]) / (3 * 0.25), float(d[0, 0]) / (3 * 0.25)]
    assert assignment.coefficients == pytest.approx(expected, rel=1e-15)
    assert assignment.active.tolist() == [1, 0, 2]


def test_a_round_of_nobody_is_possible_if_processors_draw_on_their_own() -> None:
    assignment = Uniform(active=1e-9).assign(MIXED, None, 0, torch.Generator().manual_seed(0))
    assert (assignment.clients, assignment.coefficients, assignment.active.tolist()) == ([], [], [0, 0, 0])


def test_all_who_can_train_are_active_if_fewer_are_available_than_asked_for() -> None:
    for design in (None, Systematic()):
        for sampler in (Uniform(active=4, design=design), LossVarianceReduced(active=4, design=design)):
            assignment = sampler.assign(GAPS, None, 0, torch.Generator().manual_seed(0))
            assert sorted(assignment.clients) == [0, 2, 3]


def test_choices_are_their_repr() -> None:
    assert repr(FullParticipation()) == "FullParticipation(normalize=False)"
    sampler = LossVarianceReduced(2, Systematic(), measure=5)
    assert repr(sampler) == "LossVarianceReduced(active=2, design=Systematic(), normalize=False, measure=5)"
    assert sampler == LossVarianceReduced(2, Systematic(), measure=5)
    figures = [type(s).figure for s in (Uniform(1), LossVarianceReduced(1), UpdateVarianceReduced(1))]
    assert [*figures, StaleUpdateVarianceReduced(1).figure] == ["", "loss", "update", "stale update"]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Uniform(0), ValueError, "`active` must be positive and finite, got 0"),
        (lambda: Uniform(2.5, Systematic()), ValueError, "must be whole with a design, got 2.5; round it or"),
        (lambda: Uniform(2, Systematic), TypeError, "got the class Systematic; write Systematic"),
        (lambda: Uniform(2, normalize="yes"), TypeError, "`normalize` must be True or False, got 'yes'"),
        (lambda: FullParticipation(normalize=1), TypeError, "`normalize` must be True or False, got 1"),
        (lambda: LossVarianceReduced(2, measure=0), ValueError, 'at least 1, got 0; it is "all", "last" or a number'),
        (lambda: LossVarianceReduced(2, measure="some"), TypeError, 'got \'some\'; it is "all", "last" or a number'),
    ],
)
def test_bad_choices_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_more_active_processors_than_can_train_are_refused_at_set_up() -> None:
    Uniform(active=3).check(GAPS)
    with pytest.raises(ValueError, match=r"at most 3, the number of processors that can train something, got 3\.5"):
        Uniform(active=3.5).check(GAPS)


@pytest.mark.parametrize(
    "bad",
    [
        lambda scores: scores[:, :1],
        lambda scores: scores.sign(),  # rows that sum to more than one
        lambda scores: scores.sign() - 1,
        lambda scores: torch.full_like(scores, 0.1),  # even where a processor cannot train the model
        lambda scores: scores * math.nan,
    ],
)
def test_probabilities_of_somebody_elses_sampler_are_checked(bad: Callable[[Tensor], Tensor]) -> None:
    class Careless(Sampler):
        def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
            return bad(scores)

    with pytest.raises(ValueError, match=r"probs must return non-negative numbers of shape \(4, 2\)"):
        Careless(active=1).assign(GAPS, None, 0, torch.Generator())
