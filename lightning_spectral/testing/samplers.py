"""The contract of a client sampler, as a test."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_spectral.errors import check_is
from lightning_spectral.participation import Population, Sampler

TOLERANCE = 1e-9  # sums of a few probabilities are far more accurate than this
DEVIATIONS = 5.0


def _populations() -> Iterator[tuple[str, Population]]:
    sizes = torch.tensor([[30, 10, 5], [4, 0, 7], [9, 8, 0], [2, 6, 1]])
    yield "three models, several processors", Population(sizes, processors=torch.tensor([3, 1, 2, 1]))
    yield "three models, one processor each", Population(sizes, processors=torch.ones(4, dtype=torch.int64))
    yield "one model", Population(sizes[:, :1].contiguous(), processors=torch.ones(4, dtype=torch.int64))


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
    for name, population in _populations():
        where = f"{sampler!r} on '{name}'"
        figures = _figures(population)
        _check_probs(sampler, population, figures, where)
        _check_pure(sampler, population, _figures(population), where)
        if not sampler.normalize:
            _check_unbiased(sampler, population, figures, num_samples, where)


def _figures(population: Population) -> Tensor:
    """Positive figures, one of which is unknown."""
    shape = population.num_examples.shape
    figures = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    figures[0, 0] = math.nan
    return figures


def _check_probs(sampler: Sampler, population: Population, figures: Tensor, where: str) -> None:
    scores = sampler.scores(population, figures)
    able = int((scores.sum(1) > 0).sum())
    for round_idx in range(3):
        probs = sampler.probs(scores, round_idx)
        rows = probs.sum(1)
        assert probs.shape == scores.shape, f"{where}: probabilities have shape {tuple(probs.shape)}."
        assert bool((probs >= 0).all()), f"{where}: there are negative probabilities: {probs}."
        assert bool((rows <= 1 + TOLERANCE).all()), f"{where}: probabilities of a processor sum to more than 1: {rows}."
        assert not probs[~population.can].any(), f"{where}: a processor may draw a model that it cannot train: {probs}."
        total, expected = float(probs.sum()), min(sampler.active, able)
        assert math.isclose(total, expected, rel_tol=TOLERANCE), f"{where}: the sum is {total}, not {expected}."


def _check_pure(sampler: Sampler, population: Population, figures: Tensor, where: str) -> None:
    before = figures.clone()
    one, two = (sampler.assign(population, figures, 1, torch.Generator().manual_seed(3)) for _ in range(2))
    same = (figures == before) | (figures.isnan() & before.isnan())
    assert bool(same.all()), f"{where}: the figures were changed in place."
    pairs = [list(zip(drawn.clients, drawn.models, drawn.coefficients, strict=True)) for drawn in (one, two)]
    assert pairs[0] == pairs[1], f"{where}: the same generator drew {pairs[0]} and {pairs[1]}."


def _check_unbiased(sampler: Sampler, population: Population, figures: Tensor, num_samples: int, where: str) -> None:
    generator = torch.Generator().manual_seed(0)
    sums = torch.zeros(num_samples, population.num_examples.shape[1], dtype=torch.float64)
    for row in range(num_samples):  # rounds in turn, because a sampler may have a plan over several
        drawn = sampler.assign(population, figures, row, generator)
        sums[row].index_add_(
            0, torch.tensor(drawn.models, dtype=torch.int64), torch.tensor(drawn.coefficients).double()
        )
    error = (sums.mean(0) - 1.0).abs()
    bound = DEVIATIONS * sums.std(0) / math.sqrt(num_samples) + TOLERANCE
    assert bool((error <= bound).all()), f"{where}: coefficients sum to {sums.mean(0)} on average, not to 1."
