"""The contracts of what a federation draws, as tests: strategies, designs, channels, samplers and partitioners."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.participation import Population, Sampler
from lightning_spectral.partition.partition import Partition, Partitioner
from lightning_spectral.sharding import ChannelChoice, ShardingStrategy

# Sums of N <= 64 probabilities, and results that must be equal, are far more accurate than this.
TOLERANCE = 1e-9
DEVIATIONS = 5.0  # standard errors by which a frequency or a mean may be off
SEEDS = range(8)  # of partitions
# channels of a group, and how many of them are kept; rounds
CHANNELS, ROUNDS = ((1, 1), (2, 1), (7, 3), (8, 8), (64, 16), (64, 63)), (0, 1, 5, 1000)


def _generator(seed: int) -> Generator:
    return Generator().manual_seed(seed)


def _float64(**values: Any) -> dict[str, Tensor]:
    return {name.replace("_", " "): torch.as_tensor(value, dtype=torch.float64) for name, value in values.items()}


SLOW = 1 / torch.arange(1, 41, dtype=torch.float64).sqrt()
SPECTRA = _float64(
    slow_decay=SLOW,
    fifteen_decades=10.0 ** -torch.linspace(0, 15, 16, dtype=torch.float64),
    flat=torch.ones(12),
    ties=[3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0],
    spectral_gap=torch.cat([1e6 * SLOW[:4], SLOW[:8]]),
    rank_3_of_8=torch.cat([SLOW[:3], torch.zeros(5)]),
    all_zero=torch.zeros(6),
    one_term=[2.0],
)
PROBS = _float64(
    uneven=[0.9, 0.8, 0.6, 0.3, 0.2, 0.1, 0.05, 0.05],
    certain_and_impossible_terms_shuffled=[0.2, 1.0, 0.05, 0.0, 0.8, 0.6, 1.0, 0.9, 0.1, 0.3, 0.05, 0.0],
    one_of_many=[0.4, 0.3, 0.15, 0.1, 0.05],
    all_but_one=[0.99, 0.9, 0.7, 0.41],
    one_open_place_beside_a_certain_term=[1.0, 0.5, 0.5],
    nearly_certain_terms=[1 - 1e-9, 0.5, 0.5, 1e-9, 0.7, 0.3],
    certain_terms_only=[0.0, 1.0, 1.0, 0.0],
    all_terms=[1.0, 1.0, 1.0],
    twenty_terms=[0.05 + 0.9 * i / 19 for i in range(20)],
)
REFUSED = {
    "their sum 1.5 is not whole": [0.5, 0.5, 0.5],
    "one is above 1": [1.5, 0.5],
    "one is negative": [-0.5, 0.75, 0.75],
    "one is NaN": [float("nan"), 1.0],
    "they have two dimensions": [[0.5, 0.5]],
}
SIZES = torch.tensor([[30, 10, 5], [4, 0, 7], [9, 8, 0], [2, 6, 1]])
POPULATIONS = {
    "three models, several processors": Population(SIZES, processors=torch.tensor([3, 1, 2, 1])),
    "three models, one processor each": Population(SIZES, processors=torch.ones(4, dtype=torch.int64)),
    "one model": Population(SIZES[:, :1].contiguous(), processors=torch.ones(4, dtype=torch.int64)),
}


def check_strategy(strategy: ShardingStrategy, *, num_samples: int = 4000) -> None:
    """Check that a strategy satisfies the contract of :class:`~lightning_spectral.sharding.ShardingStrategy`.

    This tries spectra with slow and steep decay, ties, gaps, zeros and rank deficiency, and several sample sizes and
    cohorts. It checks shapes and types, the range and sum of the probabilities, that multipliers are finite and
    positive, that the order and unit of the singular values do not matter, that all results are one for n = N, and that
    the strategy's own design draws with these probabilities.

    Args:
        strategy: The strategy.
        num_samples: Number of draws from its own design for the last check; a frequency is wrong if it is off by more
            than five standard deviations.

    Example:
        >>> from lightning_spectral.sharding import Unbiased
        >>> check_strategy(Unbiased())
    """
    check_is("strategy", strategy, ShardingStrategy)
    for name, spectrum in SPECTRA.items():
        values = spectrum.clone()  # a strategy that writes in place must not spoil what the next one is given
        for num_terms in sorted({1, max(1, len(values) // 5), max(1, len(values) - 1), len(values)}):
            for cohort_size in (1, 4.5, 100):
                where = f"{strategy!r} on spectrum '{name}', n={num_terms}, C={cohort_size}"
                _check_allocation(strategy, values, num_terms, cohort_size, where)
        num_terms = max(1, len(values) // 3)
        probs, _ = strategy(values, num_terms, 10)
        design = strategy.own_design(values, num_terms)
        where = f"{strategy!r} on spectrum '{name}': its own design {design!r}"
        draws = design.sample(probs, num_samples, _generator(0))
        check_rows(draws, probs, num_samples, where)
        check_frequencies(draws, probs, where)


def _check_allocation(
    strategy: ShardingStrategy, values: Tensor, num_terms: int, cohort_size: float, where: str
) -> None:
    before = values.clone()
    probs, multipliers = strategy(values, num_terms, cohort_size)
    assert torch.equal(values, before), f"{where}: the singular values were changed in place."
    for what, tensor in (("inclusion probabilities", probs), ("multipliers", multipliers)):
        assert tensor.shape == values.shape, f"{where}: {what} have shape {tuple(tensor.shape)}."
        assert tensor.dtype == torch.float64, f"{where}: {what} have dtype {tensor.dtype}, not float64."
        assert bool(torch.isfinite(tensor).all()), f"{where}: {what} are not finite: {tensor}."
    assert bool(((probs >= 0) & (probs <= 1)).all()), f"{where}: probabilities leave [0, 1]: {probs}."
    total = float(probs.sum())
    assert math.isclose(total, num_terms, rel_tol=TOLERANCE), f"{where}: probabilities sum to {total}, not n."
    assert bool((multipliers > 0).all()), f"{where}: multipliers are not positive: {multipliers}."
    if num_terms == len(values):
        assert bool((probs == 1).all()), f"{where}: n = N, but not all probabilities are one: {probs}."
        assert bool((multipliers == 1).all()), f"{where}: n = N, but not all multipliers are one: {multipliers}."
    # Not a power of two, so that the rounding differs; the result must not change, nor may rounding break ties.
    others = {"unit": (strategy(1000 * values, num_terms, cohort_size), (probs, multipliers))}
    if len(set(values.tolist())) == len(values):  # a tie may be broken by position
        order = torch.randperm(len(values), generator=_generator(0))
        others["order"] = strategy(values[order], num_terms, cohort_size), (probs[order], multipliers[order])
    for what, (actual, expected) in others.items():
        for one, other in zip(expected, actual, strict=True):
            worst = float((one - other).abs().div(one.clamp_min(1)).max())
            assert worst <= TOLERANCE, (
                f"{where}: the answer depends on the {what} of the singular values. Largest difference {worst:.2e}."
            )


def check_design(design: Design, *, num_samples: int = 4000) -> None:
    """Check that a design satisfies the contract of :class:`~lightning_spectral.designs.Design`.

    This checks that draws have the exact size, and terms are sorted and distinct; that certain terms are always drawn
    and impossible ones never; that the frequencies of terms are within five standard deviations of their inclusion
    probabilities; that rows are independent; that the same generator state gives the same draw and a different state a
    different one; that ``sample`` equals ``fit`` and ``draw``, and ``fit_all`` equals ``fit``; and that bad input
    raises errors.

    Args:
        design: The design. It must accept any inclusion probabilities.
        num_samples: Number of draws in each case; more draws reveal smaller deviations.

    Example:
        >>> from lightning_spectral.designs import ConditionalPoisson
        >>> check_design(ConditionalPoisson())
    """
    check_is("design", design, Design)
    cases = {name: probs.clone() for name, probs in PROBS.items()}
    all_fitted = design.fit_all([probs.clone() for probs in cases.values()])
    for (name, probs), together in zip(cases.items(), all_fitted, strict=True):
        where = f"{design!r} on '{name}'"
        draws = design.sample(probs, num_samples, _generator(1))
        check_rows(draws, probs, num_samples, where)
        check_frequencies(draws, probs, where)
        variance = probs * (1 - probs)
        tested = variance > 1e-3  # a correlation of terms that hardly ever change cannot be measured
        deviations = (_indicators(draws, len(probs)) - probs)[:, tested] / variance[tested].sqrt()
        correlations = (deviations[1:] * deviations[:-1]).mean(0)
        # Under independence each correlation of consecutive rows has mean 0 and variance 1 / (number of pairs).
        bound = DEVIATIONS / (len(draws) - 1) ** 0.5
        assert bool((correlations.abs() <= bound).all()), (
            f"{where}: consecutive samples are correlated by {float(correlations.abs().max()):.3f} > {bound:.3f}."
        )
        fitted = design.fit(probs)
        same = fitted.draw(num_samples, _generator(1))
        assert torch.equal(draws, same), f"{where}: fit and draw from the same generator state differ from sample."
        other = design.sample(probs, num_samples, _generator(2))
        fixed = bool(((probs == 0) | (probs == 1)).all())
        assert fixed or not torch.equal(draws, other), f"{where}: the draw does not depend on the generator."
        assert torch.equal(fitted.draw(50, _generator(3)), together.draw(50, _generator(3))), (
            f"{where}: `fit_all` draws differently from `fit`."
        )
    for why, refused in REFUSED.items():
        try:
            design.fit(torch.tensor(refused, dtype=torch.float64))
        except ValueError:
            continue
        raise AssertionError(f"{design!r}: fit accepted inclusion probabilities although {why}.")


def check_rows(draws: Tensor, probs: Tensor, num_samples: int, where: str) -> None:
    """Check type, shape, range and order of a draw; ``where`` starts the error message."""
    shape = (num_samples, round(float(probs.sum())))
    assert draws.dtype == torch.int64, f"{where}: terms have dtype {draws.dtype}, not int64."
    assert tuple(draws.shape) == shape, f"{where}: the draw has shape {tuple(draws.shape)}, not {shape}."
    assert bool(((draws >= 0) & (draws < len(probs))).all()), f"{where}: a term is not in [0, N)."
    assert bool((draws.diff(dim=1) > 0).all()), f"{where}: the terms of a row are not sorted and distinct."


def _indicators(draws: Tensor, num_total: int) -> Tensor:
    """Indicators of the terms in each sample, shape (num_samples, N), as float64."""
    return torch.zeros(len(draws), num_total, dtype=torch.float64).scatter_(1, draws, 1.0)


def check_frequencies(draws: Tensor, probs: Tensor, where: str) -> None:
    """Check the frequency of each term against its probability; ``where`` starts the error message."""
    frequencies = _indicators(draws, len(probs)).mean(0)
    sigma = (probs * (1 - probs) / len(draws)).sqrt()
    # Allow one draw more or less, because the frequency of a rare term is not near normal.
    bound = torch.where((probs > 0) & (probs < 1), DEVIATIONS * sigma + 1 / len(draws), 0.0)
    for term in range(len(probs)):
        assert abs(frequencies[term] - probs[term]) <= bound[term], (
            f"{where}: term {term} has frequency {float(frequencies[term]):.5f} in {len(draws)} samples, "
            f"but inclusion probability {float(probs[term]):.5f}."
        )


def check_channel_choice(channels: ChannelChoice) -> None:
    """Check that a choice of channels satisfies the contract of :class:`~lightning_spectral.sharding.ChannelChoice`.

    This tries groups of 1 to 64 channels, of which few or all are kept, in several rounds. It checks the number, type
    and device of the indices, that they are distinct channels of the group, that they depend only on the arguments, and
    that nothing is drawn from torch's global generator.

    Args:
        channels: The choice.

    Example:
        >>> from lightning_spectral import RandomChannels
        >>> check_channel_choice(RandomChannels())
    """
    check_is("channels", channels, ChannelChoice)
    for (num_channels, num_kept), round_idx in ((case, round_idx) for case in CHANNELS for round_idx in ROUNDS):
        where = f"{channels!r} on {num_kept} of {num_channels} channels in round {round_idx}"
        before = torch.get_rng_state()
        chosen, again = (channels(num_channels, num_kept, round_idx, _generator(1)) for _ in range(2))
        is_untouched = torch.equal(before, torch.get_rng_state())
        assert is_untouched, f"{where}: it drew from torch's global generator, not from the one that it was given."
        assert isinstance(chosen, Tensor), f"{where}: it returned {chosen!r}, not a tensor."
        assert chosen.dtype == torch.int64, f"{where}: indices have dtype {chosen.dtype}, not int64."
        assert chosen.device.type == "cpu", f"{where}: indices are on {chosen.device}, not on the CPU."
        assert chosen.shape == (num_kept,), f"{where}: indices have shape {tuple(chosen.shape)}, not ({num_kept},)."
        assert bool(((chosen >= 0) & (chosen < num_channels)).all()), f"{where}: an index is not in [0, N): {chosen}."
        assert len(set(chosen.tolist())) == num_kept, f"{where}: indices are not distinct: {chosen}."
        assert torch.equal(chosen, again), f"{where}: the same generator state gave {chosen} and {again}."


def check_sampler(sampler: Sampler, *, num_samples: int = 1000) -> None:
    """Check that a sampler satisfies the contract of :class:`~lightning_spectral.participation.Sampler`.

    This tries populations with one model or several, with gaps, and with one processor or several. It checks that
    probabilities are in [0, 1]; that those of a processor sum to at most one, and all of them to ``active``, or to the
    number of processors if that is less; that no client is asked to train a model that it cannot train; that a draw is
    a pure function of its arguments; and that coefficients are unbiased: over a cycle of rounds, the mean of their sums
    is one.

    Args:
        sampler: The sampler.
        num_samples: Number of draws for the last check; a mean is wrong if it is off by more than five of its
            standard errors.

    Example:
        >>> from lightning_spectral.participation import Uniform
        >>> check_sampler(Uniform(active=2), num_samples=500)
    """
    check_is("sampler", sampler, Sampler)
    for name, population in copy.deepcopy(POPULATIONS).items():
        where = f"{sampler!r} on '{name}'"
        figures = torch.rand(population.num_examples.shape, dtype=torch.float64, generator=_generator(0)) + 0.1
        figures[0, 0] = math.nan  # of an unknown client
        before = figures.clone()
        scores = sampler.scores(population, figures)
        expected = min(sampler.active, int((scores.sum(1) > 0).sum()))
        for round_idx in range(3):
            probs = sampler.probs(scores, round_idx)
            rows, total = probs.sum(1), float(probs.sum())
            assert probs.shape == scores.shape, f"{where}: probabilities have shape {tuple(probs.shape)}."
            assert bool((probs >= 0).all()), f"{where}: there are negative probabilities: {probs}."
            assert bool((rows <= 1 + TOLERANCE).all()), f"{where}: those of a processor sum to more than 1: {rows}."
            assert not probs[~population.can].any(), f"{where}: processors may draw what they cannot train: {probs}."
            assert math.isclose(total, expected, rel_tol=TOLERANCE), f"{where}: the sum is {total}, not {expected}."
        one, two = (sampler.assign(population, figures, 1, _generator(3)) for _ in range(2))
        same = (figures == before) | (figures.isnan() & before.isnan())
        assert bool(same.all()), f"{where}: the figures were changed in place."
        pairs = [list(zip(drawn.clients, drawn.models, drawn.coefficients, strict=True)) for drawn in (one, two)]
        assert pairs[0] == pairs[1], f"{where}: the same generator drew {pairs[0]} and {pairs[1]}."
        if sampler.normalize:
            continue
        generator = _generator(0)
        sums = torch.zeros(num_samples, population.num_examples.shape[1], dtype=torch.float64)
        for row in range(num_samples):  # rounds in turn, because a sampler may have a plan over several
            drawn = sampler.assign(population, figures, row, generator)
            models, coefficients = torch.tensor(drawn.models, dtype=torch.int64), torch.tensor(drawn.coefficients)
            sums[row].index_add_(0, models, coefficients.double())
        bound = DEVIATIONS * sums.std(0) / math.sqrt(num_samples) + TOLERANCE
        means = sums.mean(0)
        assert bool(((means - 1.0).abs() <= bound).all()), f"{where}: coefficients sum to {means} on average, not to 1."


def check_partitioner(partitioner: Partitioner, num_examples: int, labels: Tensor | None = None) -> None:
    """Check that a partitioner satisfies its contract on one data set.

    This checks that no client is empty, every example is used at most once and indices are in range; that the same
    generator gives the same split, and other seeds give another one unless the partitioner draws nothing or has one
    client; that the global generators and the labels are left unchanged; and that labels are required if and only if
    they are needed.

    Args:
        partitioner: The partitioner.
        num_examples: Number of examples; enough that two random splits are unlikely to coincide.
        labels: Class of each example, integers, shape ``(num_examples,)``; may be ``None`` if they are not
            needed.

    Example:
        >>> from lightning_spectral.partition import IIDPartitioner
        >>> check_partitioner(IIDPartitioner(num_clients=3), num_examples=20)
    """
    check_is("partitioner", partitioner, Partitioner)

    def split(seed: int, labels: Tensor | None = labels) -> Partition:
        return partitioner(num_examples, labels, _generator(seed))

    generator = _generator(SEEDS[0])
    start, global_states = generator.get_state(), _global_states()
    labels_before = None if labels is None else labels.clone()
    first = partitioner(num_examples, labels, generator)
    is_random = not torch.equal(start, generator.get_state())
    assert _global_states() == global_states, "the global generators must be left as they were"
    if labels is not None and labels_before is not None:
        assert torch.equal(labels, labels_before), "the labels must be left as they were"
    try:
        without = split(SEEDS[0], None)
    except ValueError:
        assert partitioner.needs_labels, "`needs_labels` is False, but the split refuses to work without labels"
    else:
        assert not partitioner.needs_labels, "`needs_labels` is True, but missing labels raise no ValueError"
        assert without.fingerprint == first.fingerprint, "`needs_labels` is False, but the labels change the split"

    fingerprints = set()
    for seed in SEEDS:
        partition, context = split(seed), f"(seed {seed})"
        assert partition.num_clients == partitioner.num_clients, f"`num_clients` is not that of the split {context}"
        assert bool((partition.sizes > 0).all()), f"a client has no examples {context}"
        assert int(partition.indices.min()) >= 0, f"an index is negative {context}"
        assert int(partition.indices.max()) < num_examples, f"an index is beyond the data set {context}"
        assert len(set(partition.indices.tolist())) == partition.num_assigned, f"an example is used twice {context}"
        assert partition.fingerprint == split(seed).fingerprint, f"seed {seed} must give the same split twice"
        fingerprints.add(partition.fingerprint)
    if not is_random:
        assert len(fingerprints) == 1, "the split changes without a draw from the generator"
    elif first.num_clients > 1:
        assert len(fingerprints) > 1, f"{len(SEEDS)} different seeds gave one and the same split"


def _global_states() -> tuple[Any, ...]:
    """States of the global generators of Python, numpy and torch, comparable with ``==``."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), rest, torch.get_rng_state().numpy().tobytes()
