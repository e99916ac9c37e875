"""Client samplers: populations, scores, draws, and unbiasedness by enumerating every possible draw."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.designs import Brewer, ConditionalPoisson, Design, Systematic
from lightning_spectral.functional.figures import step_size_variance
from lightning_spectral.participation.samplers import (
    Assignment,
    FullParticipation,
    LossVarianceReduced,
    Population,
    RoundRobin,
    Sampler,
    StaleUpdateVarianceReduced,
    Uniform,
    UniformParticipation,
    UpdateVarianceReduced,
    draw_choices,
    outcome_to_assignment,
    processor_joint_probs,
    sampling_scores,
)
from lightning_spectral.testing import check_sampler

MIXED = Population(torch.tensor([[30, 10, 5], [10, 0, 7]]), processors=torch.tensor([3, 1]))
GAPS = Population(
    torch.tensor([[30, 10], [4, 5], [10, 3], [2, 8]]),
    processors=torch.tensor([1, 1, 1, 1]),
    available=torch.tensor([[True, True], [False, False], [True, False], [True, True]]),
)
ONE_MODEL = Population(torch.tensor([[30], [10]]), processors=torch.tensor([2, 2]))
POPULATIONS = [MIXED, GAPS, ONE_MODEL]

DRAWN: list[Sampler] = [
    *(Uniform(active=1.5), LossVarianceReduced(active=2)),
    *(UpdateVarianceReduced(active=2.5), StaleUpdateVarianceReduced(active=1.5)),
]


def some_figures(population: Population, seed: int = 0) -> Tensor:
    """Positive figures, some of which are unknown."""
    generator = torch.Generator().manual_seed(seed)
    figures = torch.rand(population.num_examples.shape, dtype=torch.float64, generator=generator) + 0.1
    figures[0, 0] = math.nan
    return figures


def outcomes(probs: Tensor) -> Iterator[tuple[float, Tensor]]:
    """Every combination of what independent processors draw, with its probability."""
    rows = [[(float(1 - row.sum()), -1), *((float(p), s) for s, p in enumerate(row) if p > 0)] for row in probs]
    for outcome in itertools.product(*rows):
        yield math.prod(p for p, _ in outcome), torch.tensor([choice for _, choice in outcome])


def expected_average(population: Population, sampler: Sampler, values: Tensor, round_idx: int = 0) -> Tensor:
    """Expectation of sum c * x for each model, over everything that could be drawn; values (N, S)."""
    scores = sampler.scores(population, some_figures(population))
    probs = sampler.probs(scores, round_idx)
    total = torch.zeros(values.shape[1], dtype=torch.float64)
    for chance, choice in outcomes(probs):
        assignment = outcome_to_assignment(population, sampler.long_run_probs(scores, probs), choice)
        for client, model, coefficient in zip(
            assignment.clients, assignment.models, assignment.coefficients, strict=True
        ):
            total[model] += chance * coefficient * values[client, model]
    return total


def random_values(population: Population, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(population.num_examples.shape, dtype=torch.float64, generator=generator)


def test_shares_count_only_clients_that_can_train() -> None:
    # client 1 is not available; client 2 only for model 0
    expected = torch.tensor([[30 / 42, 10 / 18], [0, 0], [10 / 42, 0], [2 / 42, 8 / 18]], dtype=torch.float64)
    assert torch.allclose(GAPS.shares, expected, rtol=1e-15, atol=0)
    assert GAPS.can.tolist() == [[True, True], [False, False], [True, False], [True, True]]


def test_processors_of_a_client_are_adjacent_and_share_its_weight() -> None:
    assert MIXED.owner.tolist() == [0, 0, 0, 1]
    assert torch.equal(MIXED.weights[0], MIXED.shares[0] / 3)
    assert torch.equal(MIXED.weights[3], MIXED.shares[1])
    for population in POPULATIONS:
        assert torch.allclose(population.weights.sum(0), torch.ones(1).double(), rtol=1e-15, atol=0)


ONES = torch.ones(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("num_examples", "processors", "available", "message"),
    [
        (torch.ones(3).long(), ONES, None, r"`num_examples` must have shape \(N, S\) with N, S >= 1, got shape \(3,\)"),
        (torch.ones(3, 0).long(), ONES, None, r"got shape \(3, 0\)"),
        (torch.ones(3, 2), ONES, None, "`num_examples` must have .* type torch.int64, got .* torch.float32"),
        (torch.ones(2, 2).long(), ONES, None, r"`processors` must have shape \(2,\) .* got shape \(3,\)"),
        (torch.ones(3, 2).long(), ONES, torch.ones(2, 2).bool(), r"`available` must have shape \(3, 2\)"),
        (torch.ones(3, 2).long(), ONES, torch.ones(3, 2), "`available` must have .* type torch.bool"),
        (torch.tensor([[1], [-2], [1]]), ONES, None, "must not be negative, got -2 of client 1, model 0"),
        (torch.ones(3, 2).long(), torch.tensor([1, 0, -1]), None, "at least 1, got less for clients 1, 2"),
        (torch.tensor([[1, 0], [1, 0], [1, 0]]), ONES, None, "no client can train models 1; add examples"),
        (torch.ones(3, 2).long(), ONES, torch.zeros(3, 2).bool(), "no client can train models 0, 1;"),
    ],
)
def test_bad_populations_are_refused(num_examples, processors, available, message):
    with pytest.raises(ValueError, match=message):
        Population(num_examples, processors, available)


def test_of_many_clients_the_first_are_named() -> None:
    with pytest.raises(ValueError, match=r"clients 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 5 more\."):
        Population(torch.ones(15, 1).long(), torch.zeros(15).long())


NAN = math.nan


def test_scores_are_weighted_figures() -> None:
    figures = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, 6.0]])
    expected = MIXED.weights * torch.tensor([[1.0, 2.0, 3.0]] * 3 + [[4.0, 0.0, 6.0]])
    assert torch.equal(LossVarianceReduced(active=1).scores(MIXED, figures), expected)


def test_unknown_figures_count_as_the_largest_known_of_their_model() -> None:
    # client 1 has examples but is not available; its figure is still known
    figures = torch.tensor([[NAN, NAN], [9.0, NAN], [5.0, NAN], [NAN, NAN]])
    filled = torch.tensor([[9.0, 1.0], [0.0, 0.0], [5.0, 0.0], [9.0, 1.0]])
    assert torch.equal(sampling_scores(GAPS, figures), GAPS.weights * filled)
    assert torch.equal(sampling_scores(GAPS, None), GAPS.weights)


def test_figures_of_a_client_without_examples_do_not_matter() -> None:
    figures = torch.tensor([[1.0, 2.0, 3.0], [4.0, 1e9, NAN]])  # client 1 has no examples of model 1
    without = torch.tensor([[1.0, 2.0, 3.0], [4.0, NAN, NAN]])
    assert torch.equal(sampling_scores(MIXED, figures), sampling_scores(MIXED, without))
    infinite = torch.tensor([[1.0, 2.0, 3.0], [4.0, math.inf, NAN]])
    assert torch.equal(sampling_scores(MIXED, infinite), sampling_scores(MIXED, without))


def test_a_model_whose_figures_are_all_zero_or_negative_is_not_starved() -> None:
    scores = sampling_scores(MIXED, torch.tensor([[1.0, 0.0, 0.0], [4.0, 0.0, -1.0]]))
    assert torch.equal(scores[:, 1:], MIXED.weights[:, 1:])
    probs = LossVarianceReduced(active=1).probs(scores)
    assert bool((probs.sum(0) > 0).all())
    assert abs(float(probs.sum()) - 1) < 1e-15


def test_negative_figures_count_as_zero() -> None:
    negative, zero = (torch.tensor([[value, 2.0, 3.0], [4.0, NAN, 6.0]]) for value in (-1.0, 0.0))
    assert torch.equal(sampling_scores(MIXED, negative), sampling_scores(MIXED, zero))


def test_samplers_without_a_figure_ignore_figures() -> None:
    assert torch.equal(Uniform(active=1).scores(GAPS, torch.full((4, 2), math.inf)), GAPS.can.double())


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        (torch.tensor([[1.0, 2.0, 3.0], [math.inf, NAN, 6.0]]), "got inf of client 1, model 0; its training diverged"),
        (torch.tensor([[1.0, 2.0, -math.inf], [1.0, NAN, 6.0]]), "got -inf of client 0, model 2"),
        (torch.ones(2, 2), r"`figures` must have shape \(N, S\) = \(2, 3\), got \(2, 2\)"),
    ],
)
def test_bad_figures_are_refused(figures: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampling_scores(MIXED, figures)


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
            assert abs(second / first / float(probs[:, model].max() * MIXED.num_examples[:, model].sum()) - 1) < 1e-14


def test_two_processors_of_a_client_train_a_model_once_with_both_coefficients() -> None:
    probs = torch.full((4, 3), 0.25, dtype=torch.float64)
    assignment = outcome_to_assignment(MIXED, probs, torch.tensor([2, 0, 2, -1]), order=torch.tensor([2, 1, 0]))
    assert (assignment.clients, assignment.models) == ([0, 0], [2, 0])
    d = MIXED.shares
    expected = [2 * float(d[0, 2]) / (3 * 0.25), float(d[0, 0]) / (3 * 0.25)]
    assert assignment.coefficients == pytest.approx(expected, rel=1e-15)
    assert assignment.active.tolist() == [1, 0, 2]


def test_a_round_of_nobody_is_possible_if_processors_draw_on_their_own() -> None:
    draws = (Uniform(active=1).assign(MIXED, None, 0, torch.Generator().manual_seed(seed)) for seed in range(100))
    nobody = next(draw for draw in draws if not draw.clients)  # each of them with a chance of a quarter or more
    assert (nobody.coefficients, nobody.active.tolist()) == ([], [0, 0, 0])


def test_all_who_can_train_are_active_if_fewer_are_available_than_asked_for() -> None:
    for design in (None, Systematic()):
        for sampler in (Uniform(active=4, design=design), LossVarianceReduced(active=4, design=design)):
            assert sorted(sampler.assign(GAPS, None, 0, torch.Generator().manual_seed(0)).clients) == [0, 2, 3]


def test_choices_are_their_repr() -> None:
    assert repr(FullParticipation()) == "FullParticipation(normalize=False)"
    sampler = LossVarianceReduced(2, Systematic(), measure=5)
    assert repr(sampler) == "LossVarianceReduced(active=2, design=Systematic(), normalize=False, measure=5)"
    assert sampler == LossVarianceReduced(2, Systematic(), measure=5)
    figures = [type(s).figure for s in (Uniform(1), LossVarianceReduced(1), UpdateVarianceReduced(1))]
    assert [*figures, StaleUpdateVarianceReduced(1).figure] == ["", "loss", "update", "stale update"]


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
def test_probabilities_of_a_custom_sampler_are_checked(bad: Callable[[Tensor], Tensor]) -> None:
    class Careless(Sampler):
        def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
            return bad(scores)

    with pytest.raises(ValueError, match=r"probs must return non-negative numbers of shape \(4, 2\)"):
        Careless(active=1).assign(GAPS, None, 0, torch.Generator())


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


@pytest.mark.slow
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
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for pair in itertools.combinations([0, 2, 3], 2):
        trains = torch.zeros(4, dtype=torch.float64)
        trains[list(pair)] = 1
        expected += torch.outer(trains, trains) / 3
    for design in (Systematic(), Brewer()):  # whatever the design
        assert torch.allclose(processor_joint_probs(probs, design), expected, rtol=0, atol=1e-12)
    assert torch.equal(processor_joint_probs(torch.ones(1, 1), Brewer()), torch.ones(1, 1, dtype=torch.float64))


def test_a_design_that_does_not_know_joint_probabilities_says_so() -> None:
    with pytest.raises(TypeError, match=r"Brewer\(\) does not know its joint probabilities; use a JointDesign"):
        processor_joint_probs(PROBS, Brewer())


@pytest.mark.sampled(1)
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


OURS = [
    ls.Uniform(active=2),
    ls.Uniform(active=3, design=ls.ConditionalPoisson()),
    ls.Uniform(active=2, normalize=True),
    ls.RoundRobin(active=1.5),
    ls.LossVarianceReduced(active=2.5),
    ls.UpdateVarianceReduced(active=2, design=ls.ConditionalPoisson()),
    ls.StaleUpdateVarianceReduced(active=1, measure="last"),
]


@pytest.mark.sampled(1)
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
