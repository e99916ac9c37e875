"""What noise hides: the epsilon of releases with Gaussian noise and Poisson sampling, and the noise for an epsilon."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from torch import Tensor

from lightning_spectral.arguments import Number, Whole
from lightning_spectral.errors import from_extra, warn

LEAST_NOISE = 0.05  # below it epsilon is in the thousands, and takes minutes to compute
GRID = 1e-3  # of privacy losses, by which they are rounded up, for noise that hides something
COARSER_BELOW = 0.25  # noise multiplier: with less, losses are so large that a coarser grid rounds as little of them
SLACK = 1 - 2.0**-30  # more than rounding adds to a norm
FINENESS = 20  # bits of the noise's standard deviation that are on its grid
Rounds = tuple[float, float, int]  # probability to take part, noise multiplier, number of rounds
RULES = Number(above=0, at_most=1), Number(at_least=LEAST_NOISE), Whole(at_least=1)


@lru_cache(maxsize=4096)
def epsilon(
    rate: float, noise_multiplier: float, num_rounds: int, delta: float, before: tuple[Rounds, ...] = ()
) -> float:
    """Epsilon of some rounds of the Gaussian mechanism, in which each client takes part independently.

    It is computed from privacy loss distributions, rounded up, by Google's ``dp-accounting`` (extra ``privacy``).

    Args:
        rate: Probability to take part, in (0, 1].
        noise_multiplier: Standard deviation of the noise, in units of the largest contribution.
        num_rounds: Number of rounds.
        delta: The probability that the guarantee fails.
        before: Rounds before these that had another probability or multiplier.

    Raises:
        ValueError: If an argument is not in its range.

    Example:
        >>> round(epsilon(rate=0.1, noise_multiplier=1.1, num_rounds=60, delta=1e-5), 2)
        4.66
    """
    Number(above=0, below=1)("delta", delta)
    for of_rounds in (stretches := (*before, (rate, noise_multiplier, num_rounds))):
        for name, rule, value in zip(("rate", "noise_multiplier", "num_rounds"), RULES, of_rounds, strict=True):
            rule(name, value)
    with from_extra("privacy"):
        import dp_accounting as dp
    least = min(multiplier for _, multiplier, _ in stretches)
    accountant = dp.pld.PLDAccountant(value_discretization_interval=GRID * max(1.0, (COARSER_BELOW / least) ** 2))
    for probability, multiplier, count in stretches:
        event: Any = dp.GaussianDpEvent(multiplier)
        accountant.compose(event if probability == 1 else dp.PoissonSampledDpEvent(probability, event), count)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def calibrated(rate: float, target_epsilon: float, num_rounds: int, delta: float) -> float:
    """The least noise multiplier, up to a thousandth of it, with which some rounds do not exceed an epsilon.

    Example:
        >>> z = calibrated(rate=0.1, target_epsilon=4.7, num_rounds=60, delta=1e-5)
        >>> round(z, 2), epsilon(0.1, z, 60, 1e-5) <= 4.7
        (1.1, True)
    """
    low, high, noise, slope = LEAST_NOISE, math.inf, 1.0, -1.0  # `high` suffices; the slope is that of logarithms
    before: tuple[float, float] | None = None
    for attempt in range(40):  # about five are what it takes
        found = epsilon(rate, noise, num_rounds, delta)
        here = math.log(noise), math.log(max(found, 1e-9) / target_epsilon)
        low, high = (low, noise) if found <= target_epsilon else (noise, high)
        if high <= 1.001 * low:
            break
        if before is not None:
            slope = min((here[1] - before[1]) / (here[0] - before[0]), -0.2)
        # a little further than the root of the secant, so that the next two are on both sides of it
        before, noise = here, math.exp(here[0] - here[1] / slope + math.copysign(4e-4, here[1]))
        if attempt > 7 or not low < noise < high:
            noise = math.sqrt(low * high) if high < math.inf else 2 * low
    if high == math.inf:
        raise ValueError(f"No noise gives an epsilon of {target_epsilon:g} with delta={delta:g}; raise delta.")
    return high


def grid_of(std: float) -> float:
    """The gap between values with noise of a standard deviation; those of floating-point numbers would tell of them."""
    return 2.0 ** (math.frexp(std)[1] - FINENESS)


def shortened(change: Tensor, clip: float, grid: float) -> Tensor | None:
    """A change, float64, as whole steps of a grid that together are no longer than a bound; ``None`` if not finite."""
    norm, limit = float(change.norm()), clip * SLACK
    return change.mul_(limit / max(norm, limit) / grid).trunc_() if math.isfinite(norm) else None


def draws(num_examples: int, batch_size: int) -> tuple[float, int]:
    """Probability that an example is drawn in a step, and the steps of a local epoch."""
    return min(1.0, batch_size / num_examples), -(-num_examples // batch_size)


def warn_of_delta(delta: float, number: int, what: str) -> None:
    """Warn of a delta that would allow publishing the data of one of those that it is to hide."""
    if delta * number >= 1:
        warn(
            f"`delta={delta:g}` is at least one over the {number} {what}, which would allow publishing all data of one "
            "of them. Make it smaller by a factor of ten or more.",
            3,
        )
