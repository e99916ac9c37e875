r"""Conditional Poisson sampling: the fixed-size design of maximum entropy with given inclusion probabilities.

Select each term i independently with *working probability* p_i and accept the draw if it has n terms. Among all designs
with the resulting inclusion probabilities :math:`\pi`, it is the most random (Hájek 1964; Chen, Dempster & Liu 1994).
The working probabilities differ from :math:`\pi`: they are fitted once per design, and then every draw is exact.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.functional.checks import (
    as_inclusion_probs,
    as_probabilities,
    check_num_samples,
    check_num_terms,
)
from lightning_spectral.functional.sampling.open_terms import (
    CHUNK,
    SNAP,
    OpenTerms,
    centred_logits,
    count_probabilities,
    joint_of_all,
    leave_one_out_probabilities,
    leave_two_out_probabilities,
    open_masks,
    open_terms,
    solve_fixed_point,
)

# Largest number of probabilities that are fitted at once, over all vectors: about 30 MiB.
MOST_OPEN = 2**15
# Expected counts so close to n make n likely.
NEAR = 0.1


def _log_odds_ratio(probs: Tensor, num_terms: int) -> Tensor:
    """Change of each logit due to conditioning on the count: log P(N_(-i) = n - 1) - log P(N_(-i) = n)."""
    events = (num_terms - 1, num_terms - 1), (num_terms, num_terms)
    drawn, left_out = leave_one_out_probabilities(probs, *events).unbind(-2)
    # Absolute errors are near 1e-15, in the implied probability too; the floor keeps the logarithm finite.
    return drawn.clamp_min(1e-18).log() - left_out.clamp_min(1e-18).log()


def fit_conditional_poisson(inclusion_probs: Tensor) -> Tensor:
    r"""Working probabilities whose conditional Poisson draw has the given inclusion probabilities.

    Solves, by accelerated fixed-point iteration,

    .. math:: \operatorname{logit} p_i = \operatorname{logit} \pi_i - \log P(N_{-i} = n-1) + \log P(N_{-i} = n),

    where :math:`N_{-i}` counts the other selected terms. The given probabilities sum to an integer n within 1e-6 n.

    Returns:
        Working probabilities p, shape ``(N,)``, float64 on the CPU, scaled so that :math:`\sum p = n`. Ones stay one
        and zeros stay zero; inclusion probabilities within 1e-13 of them count as such. The implied inclusion
        probabilities agree within 1e-12.

    Reference:
        Chen, Dempster & Liu (1994), Biometrika 81, 457-469, for existence, uniqueness and the fixed point.

    Example:
        >>> fit_conditional_poisson(torch.tensor([1.0, 0.75, 0.25], dtype=torch.float64))
        tensor([1.0000, 0.6340, 0.3660], dtype=torch.float64)
    """
    (working,) = fit_conditional_poissons([inclusion_probs])
    return working


def fit_conditional_poissons(inclusion_probs: Sequence[Tensor]) -> list[Tensor]:
    """Fit several vectors of inclusion probabilities, those of the same length and sample size together.

    For short vectors a fit is a few hundred small operations, which take as long for many rows as for one.
    """
    fitted: list[Tensor] = []
    undecided: dict[tuple[int, int], list[_Undecided]] = defaultdict(list)
    for probs in inclusion_probs:
        target, num_terms = as_inclusion_probs(probs)
        certain, is_open, missing = open_masks(target, num_terms)
        fitted.append(certain.double())
        if missing and is_open.any():
            # centred, as rounding may leave the sum of the target a little off n
            goal = torch.zeros_like(target)
            goal[is_open] = centred_logits(torch.logit(target[is_open]), missing)
            undecided[len(target), num_terms].append(_Undecided(goal, certain, is_open, missing, fitted[-1]))
    for (size, _), rows in undecided.items():
        count = max(1, MOST_OPEN // size)
        for first in range(0, len(rows), count):
            _fit_open(rows[first : first + count])
    return fitted


class _Undecided(NamedTuple):
    """A vector with terms left to chance, and where its working probabilities go; all shapes are ``(N,)``."""

    goal: Tensor  # logits of the open terms, zero for the others
    certain: Tensor
    is_open: Tensor
    missing: int
    working: Tensor


def _fit_open(rows: Sequence[_Undecided]) -> None:
    """Write the working probabilities of the open terms of some rows, all of the same length and sample size."""
    certain, is_open = torch.stack([row.certain for row in rows]), torch.stack([row.is_open for row in rows])
    columns = is_open.any(0) | (certain.any(0) & ~certain.all(0))  # the others are the same in all rows
    num_terms = int(rows[0].certain.sum()) + rows[0].missing - int(certain.all(0).sum())
    goal = torch.stack([row.goal for row in rows])[:, columns]
    certain, is_open = certain[:, columns].double(), is_open[:, columns]

    def probs_of(logits: Tensor) -> Tensor:
        return torch.where(is_open, torch.sigmoid(logits), certain)

    target = probs_of(goal)

    def residual(logits: Tensor) -> tuple[Tensor, Tensor]:
        # Shift the logits of each row until the expected count is near n, so that the law of the count is accurate
        # there. A shift by 1 changes every variance by at most a factor of e, so each such step reduces the excess by
        # a quarter.
        for _ in range(100):
            probs = probs_of(logits)
            excess = probs.sum(-1, keepdim=True) - num_terms
            is_far = excess.abs() > NEAR
            if not is_far.any():
                break
            variance = (probs * (1 - probs)).sum(-1, keepdim=True)
            logits = logits - torch.where(is_far, excess / variance.clamp_min(1e-300), 0).clamp(-1, 1)
        gain = _log_odds_ratio(probs_of(logits), num_terms)
        return goal - gain - logits, (probs_of(logits + gain) - target).abs().amax(-1)

    # By the normal approximation the gain is (p - 1/2) / variance: a good start where the variance is large.
    variances = target * (1 - target)
    start = goal - (target - 0.5) / variances.sum(-1, keepdim=True).clamp_min(4.0)
    logits, errors = solve_fixed_point(residual, start, variances, tolerance=1e-13)
    assert errors.max() < 1e-9, f"conditional Poisson fit stopped at error {errors.max():.1e}"
    for row, own, own_open in zip(rows, logits, is_open, strict=True):
        row.working[row.is_open] = torch.sigmoid(centred_logits(own[own_open], row.missing))


def poisson_conditional_inclusion_probs(working_probs: Tensor, num_terms: int) -> Tensor:
    """Inclusion probabilities of Poisson draws that are accepted if they have n terms; float64 on the CPU, with sum n.

    The inverse of :func:`fit_conditional_poisson`. Multiplying all odds p / (1 - p) by a constant changes nothing. n
    must lie between the number of ones and the number of positive entries.

    Example:
        >>> poisson_conditional_inclusion_probs(torch.tensor([0.75, 0.25]), num_terms=1)
        tensor([0.9000, 0.1000], dtype=torch.float64)
    """
    parts = working_open_terms(working_probs, num_terms)
    implied = torch.zeros(len(working_probs), dtype=torch.float64).index_fill_(0, parts.certain, 1.0)
    if parts.num_terms > 0:
        logits = torch.logit(parts.probs)
        implied[parts.undecided] = torch.sigmoid(logits + _log_odds_ratio(parts.probs, parts.num_terms))
    return implied


def working_open_terms(working_probs: Tensor, num_terms: int) -> OpenTerms:
    """Set aside the certain and the impossible terms of a conditional Poisson design.

    The working probabilities are those of `fit_conditional_poisson`; n must be between the number of ones and that of
    positive entries.
    """
    probs = as_probabilities(working_probs, "working_probs")
    check_num_terms(num_terms, len(probs))
    ones, positive = int((probs >= 1 - SNAP).sum()), int((probs > SNAP).sum())
    if not ones <= num_terms <= positive:
        raise ValueError(
            f"`num_terms` must be between the number of ones ({ones}) and of positive entries ({positive}) "
            f"of `working_probs`, got {num_terms}."
        )
    return open_terms(probs, num_terms)


def draw_conditional_poisson(parts: OpenTerms, num_samples: int, generator: torch.Generator) -> Tensor:
    r"""Draw exact independent samples: generate rows of Bernoulli variables and keep those with n ones.

    A row is kept with probability near :math:`1 / \sqrt{2 \pi V}`, where V is the variance of its number of ones: about
    one in eight for 64 terms, one in eighty for 4096 with 2048 drawn. Memory is bounded by drawing in chunks.

    Args:
        parts: From `working_open_terms` of the design.
        num_samples: Number of draws.
        generator: Source of randomness.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the generator's device.

    Example:
        >>> parts = working_open_terms(torch.tensor([1.0, 0.5, 0.5, 0.0]), num_terms=3)
        >>> draw_conditional_poisson(parts, 1, torch.Generator())
        tensor([[0, 1, 2]])
    """
    check_num_samples(num_samples)
    if parts.num_terms == 0:
        return parts.samples(torch.empty(num_samples, 0, dtype=torch.int64, device=generator.device))
    rows_per_hit = 1 + 2.5 * float((parts.probs * (1 - parts.probs)).sum()) ** 0.5
    probs = parts.probs.to(generator.device)
    kept: list[Tensor] = []
    while (missing := num_samples - sum(map(len, kept))) > 0:
        size = (min(int(1.2 * missing * rows_per_hit) + 8, max(1, CHUNK // len(probs))), len(probs))
        # float64: in float32, terms with probabilities below 2^-24 would be drawn never or far too often.
        rows = torch.rand(size, generator=generator, device=generator.device, dtype=torch.float64) < probs
        kept.append(rows[rows.sum(1) == parts.num_terms][:missing])
    return parts.samples(torch.cat(kept).nonzero()[:, 1].view(num_samples, parts.num_terms))


def conditional_poisson_joint_probs(working_probs: Tensor, num_terms: int) -> Tensor:
    r"""Joint inclusion probabilities of conditional Poisson sampling, shape ``(N, N)``, float64.

    .. math:: \pi_{ij} = p_i p_j \, P(N_{-ij} = n - 2) / P(N = n)

    for all pairs, from one matrix product, with an absolute error of about 1e-14. Unlike the usual formula, which
    divides by the difference of the odds of i and j, this one allows ties. The working probabilities p are those of
    `fit_conditional_poisson`.

    Reference:
        Chen, Dempster & Liu (1994), Biometrika 81, 457-469.

    Example:
        >>> conditional_poisson_joint_probs(torch.tensor([1.0, 0.5, 0.5]), num_terms=2)[0]
        tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    parts = working_open_terms(working_probs, num_terms)
    marginals = poisson_conditional_inclusion_probs(working_probs, num_terms)
    if parts.num_terms == 0:
        return torch.outer(marginals, marginals)
    p, n = parts.probs, parts.num_terms
    among_open = torch.outer(p, p) * leave_two_out_probabilities(p, n - 2, n - 2) / count_probabilities(p, n, n)
    return joint_of_all(among_open, marginals, parts.certain, parts.undecided)
