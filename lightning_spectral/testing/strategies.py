"""The contract of a sharding strategy, as a test."""

import math

import torch
from torch import Tensor

from lightning_spectral.errors import check_is
from lightning_spectral.sharding.strategies import ShardingStrategy
from lightning_spectral.testing.designs import check_frequencies, check_rows

# Sums of N <= 64 probabilities, and results that must be equal, are far more accurate than this.
TOLERANCE = 1e-9


def _spectra() -> dict[str, Tensor]:
    steep = 10.0 ** -torch.linspace(0, 15, 16, dtype=torch.float64)
    slow = 1 / torch.arange(1, 41, dtype=torch.float64).sqrt()
    return {
        "slow decay": slow,
        "fifteen decades": steep,
        "flat": torch.ones(12, dtype=torch.float64),
        "ties": torch.tensor([3.0, 3.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0], dtype=torch.float64),
        "spectral gap": torch.cat([1e6 * slow[:4], slow[:8]]),
        "rank 3 of 8": torch.cat([slow[:3], torch.zeros(5, dtype=torch.float64)]),
        "all zero": torch.zeros(6, dtype=torch.float64),
        "one term": torch.tensor([2.0], dtype=torch.float64),
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
    for name, values in _spectra().items():
        for num_terms in sorted({1, max(1, len(values) // 5), max(1, len(values) - 1), len(values)}):
            for cohort_size in (1, 4.5, 100):
                where = f"{strategy!r} on spectrum '{name}', n={num_terms}, C={cohort_size}"
                _check_values(strategy, values, num_terms, cohort_size, where)
                _check_unit(strategy, values, num_terms, cohort_size, where)
                if len(set(values.tolist())) == len(values):  # a tie may be broken by position
                    _check_order(strategy, values, num_terms, cohort_size, where)
        _check_own_design(strategy, values, num_samples, f"{strategy!r} on spectrum '{name}'")


def _check_values(strategy: ShardingStrategy, values: Tensor, num_terms: int, cohort_size: float, where: str) -> None:
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


def _check_unit(strategy: ShardingStrategy, values: Tensor, num_terms: int, cohort_size: float, where: str) -> None:
    # Not a power of two, so that the rounding differs; the result must not change, nor may rounding break ties.
    expected, actual = (strategy(v, num_terms, cohort_size) for v in (values, 1000 * values))
    _compare(expected, actual, f"{where}: the answer depends on the unit of the singular values.")


def _check_order(strategy: ShardingStrategy, values: Tensor, num_terms: int, cohort_size: float, where: str) -> None:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    probs, multipliers = strategy(values, num_terms, cohort_size)
    actual = strategy(values[order], num_terms, cohort_size)
    _compare((probs[order], multipliers[order]), actual, f"{where}: the answer depends on the order.")


def _compare(expected: tuple[Tensor, Tensor], actual: tuple[Tensor, Tensor], message: str) -> None:
    for one, other in zip(expected, actual, strict=True):
        worst = float((one - other).abs().div(one.clamp_min(1)).max())
        assert worst <= TOLERANCE, f"{message} Largest difference {worst:.2e}."


def _check_own_design(strategy: ShardingStrategy, values: Tensor, num_samples: int, where: str) -> None:
    num_terms = max(1, len(values) // 3)
    probs, _ = strategy(values, num_terms, 10)
    design = strategy.own_design(values, num_terms)
    draws = design.sample(probs, num_samples, torch.Generator().manual_seed(0))
    check_rows(draws, probs, num_samples, f"{where}: its own design {design!r}")
    check_frequencies(draws, probs, f"{where}: its own design {design!r}")
