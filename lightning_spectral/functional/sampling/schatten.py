r"""Inclusion probabilities with the least upper bound on the expected Schatten norm of the error.

The paper solves this by numerical constrained optimisation and finds that unstable. This can be avoided: with
:math:`x = 1/\pi - 1` each summand is :math:`s^p` times the perspective of a convex function, hence convex in
:math:`\pi`, and the sum is separable. So a single Lagrange multiplier :math:`\beta` determines all terms, and bisection
on it finds the optimum for any p.
"""

import math

import torch
from torch import Tensor

from lightning_spectral.arguments import Number
from lightning_spectral.functional.checks import as_magnitudes, check_num_terms
from lightning_spectral.functional.sampling.inclusion import relative, top_inclusion_probs

ORDER = Number(at_least=2, hint="it is the order of a Schatten norm")

# Above this log(beta / s^p), the odds against a term equal their leading power alone, to the last bit.
LARGE = 200.0


def schatten_inclusion_probs(singular_values: Tensor, num_terms: int, p: float = 4.0) -> Tensor:
    r"""Minimise :math:`\sum_i s_i^p \left[1 - \pi_i + \pi_i (1/\pi_i - 1)^p\right]` under :math:`\sum_i \pi_i = n`.

    The singular values must be non-negative, shape ``(N,)``, in any order and unit; the result is float64. The order p
    of the norm is at least 2, which gives `proportional_inclusion_probs`.

    Note:
        Small terms get probabilities nearly proportional to their values for any p; p determines where that ends. Where
        :math:`s_i^p \ge \beta` a term is certain. When at most n values are positive, they are certain and the first
        zero terms fill the sample up to n.

    Reference:
        Korzhenkov & Louizos (2024), Eq. (10).

    Example:
        >>> s = torch.tensor([6.0, 2.0, 1.0, 1.0], dtype=torch.float64)
        >>> schatten_inclusion_probs(s, num_terms=2, p=2)
        tensor([1.0000, 0.5000, 0.2500, 0.2500], dtype=torch.float64)
    """
    ORDER("p", p)
    values = as_magnitudes(singular_values, "singular_values")
    check_num_terms(num_terms, len(values))
    scaled = relative(values)
    positive = scaled > 0
    if int(positive.sum()) <= num_terms:
        return top_inclusion_probs(values, num_terms)
    log_powers = p * torch.where(positive, scaled, 1.0).log()
    probs = _probs_at(_log_price(log_powers, positive, num_terms, p), log_powers, positive, p)
    return _exact_sum(probs, log_powers, num_terms, p)


def _log_price(log_powers: Tensor, positive: Tensor, num_terms: int, p: float) -> float:
    """Logarithm of the multiplier at which the probabilities sum to n; the sum falls as the multiplier rises."""
    low = float(log_powers[positive].min())  # everything is certain
    high = float(log_powers[positive].max()) + 1.0
    while float(_probs_at(high, log_powers, positive, p).sum()) > num_terms:
        low, high = high, high + 2 * (high - low)
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        enough = float(_probs_at(middle, log_powers, positive, p).sum()) > num_terms
        low, high = (middle, high) if enough else (low, middle)
    return high


def _probs_at(log_price: float, log_powers: Tensor, positive: Tensor, p: float) -> Tensor:
    log_ratio = (log_price - log_powers).clamp_min(0.0)  # below zero a term is certain
    return torch.where(positive, 1 / (1 + _odds_against(log_ratio, p)), 0.0)


def _odds_against(log_ratio: Tensor, p: float) -> Tensor:
    """Solve p x^(p-1) + (p-1) x^p = e^log_ratio - 1 for x >= 0: Newton from above, on a convex function."""
    target = log_ratio.clamp(max=LARGE).expm1()
    x = torch.minimum((target / p) ** (1 / (p - 1)), (target / (p - 1)) ** (1 / p))
    for _ in range(20):
        excess = p * x ** (p - 1) + (p - 1) * x**p - target
        slope = p * (p - 1) * (x ** (p - 2) + x ** (p - 1))
        x = torch.where(x > 0, x - excess / slope, 0.0).clamp_min(0.0)
    return torch.where(log_ratio > LARGE, ((log_ratio - math.log(p - 1)) / p).exp(), x)


def _exact_sum(probs: Tensor, log_powers: Tensor, num_terms: int, p: float) -> Tensor:
    """Make the sum exactly n where that costs least: one Newton step of the constrained problem.

    Close to certainty the objective is so flat that different probabilities have the same floating-point price.
    """
    inner = (probs > 0) & (probs < 1)
    odds = 1 / probs[inner] - 1
    log_room = 2 * probs[inner].log() - log_powers[inner] - (odds ** (p - 2) + odds ** (p - 1)).log()
    room = (log_room - log_room.max()).exp() if len(log_room) else log_room
    corrected = probs.clone()
    corrected[inner] -= (probs.sum() - num_terms) * room / room.sum()
    return corrected.clamp(0.0, 1.0)
