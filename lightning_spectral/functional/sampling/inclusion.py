r"""Inclusion probabilities of the sharding strategies, from singular values.

All take the N singular values, in any order and any unit, and the number n of terms that a client holds, and return
probabilities that sum to n. Values below 1e-250 times the largest count as zero. When at most n values are positive,
all of them are certain, and the first zero terms, in the order given, fill the sample up to n: a term of size zero
contributes nothing, so it does not matter which one is drawn, but the sample size does.
"""

import bisect
import math

import numpy as np
import torch
from torch import Tensor

from lightning_spectral.arguments import Number
from lightning_spectral.functional.checks import COHORT_SIZE, as_magnitudes, check_num_terms

# Values below this share of the largest count as zero, because quotients would overflow.
SMALLEST = 1e-250
TINY = float(np.finfo(np.float64).tiny)
# For C this close to one, Collective equals top-n to within the same relative error of its objective.
ONE_CLIENT_TOLERANCE = 1e-6

ORDER = Number(at_least=2, hint="it is the order of a Schatten norm")

# Above this log(beta / s^p), the odds against a term equal their leading power alone, to the last bit.
LARGE = 200.0


def relative(values: Tensor) -> Tensor:
    """Values in units of the largest, with zero for those so small that quotients would overflow."""
    scaled = values / values.max().clamp_min(TINY)
    return torch.where(scaled >= SMALLEST, scaled, 0.0)


def capped_proportional(values: Tensor, total: float) -> Tensor:
    r"""Solve :math:`\pi_i = \min(1, c\,s_i)` with :math:`\sum_i \pi_i = m` for sizes s that are not checked.

    The sizes are in units of the largest, from :func:`relative`, float64; m may be any real number in
    ``[0, N_positive)``.
    """
    if total == 0:
        return torch.zeros_like(values)
    most_certain = math.ceil(total)  # exclusive: certain terms and a positive remainder make up the total
    ordered = values.sort(descending=True).values
    # Sums of the tails, small values first: a difference of prefix sums loses the tail of a steep spectrum.
    tails = ordered.flip(0).cumsum(0).flip(0)
    left = total - torch.arange(most_certain, device=values.device, dtype=values.dtype)
    certain = int((ordered[:most_certain] * left <= tails[:most_certain]).nonzero()[0])
    probs = (total - certain) * values / tails[certain]
    # Certain terms are at least as large as the cap by definition: make them exactly one despite rounding.
    return torch.where(values > ordered[certain], 1.0, probs.clamp(max=1.0))


def top_inclusion_probs(singular_values: Tensor, num_terms: int) -> Tensor:
    """One for the ``num_terms`` largest values, zero for the others; ties go to the first.

    The values must be non-negative, shape ``(N,)``, and the result has their dtype and device.

    Example:
        >>> top_inclusion_probs(torch.tensor([1.0, 3.0, 2.0, 2.0]), num_terms=2)
        tensor([0., 1., 1., 0.])
    """
    values = as_magnitudes(singular_values, "singular_values")
    check_num_terms(num_terms, len(values))
    return _top(values, num_terms).to(singular_values.dtype)


def _top(values: Tensor, num_terms: int) -> Tensor:
    order = torch.argsort(values, descending=True, stable=True)
    return torch.zeros_like(values).index_fill_(0, order[:num_terms], 1.0)


def proportional_inclusion_probs(sizes: Tensor, num_terms: int) -> Tensor:
    r"""Inclusion probabilities proportional to size, capped at one.

    Solves :math:`\pi_i = \min(1, c\,s_i)` with :math:`\sum_i \pi_i = n`: the unique minimiser of
    :math:`\sum_i s_i^2 (1/\pi_i - 1)`, the Frobenius error of the unbiased estimator of one client.

    Args:
        sizes: Non-negative sizes, e.g. singular values, shape ``(N,)``, any order, any unit (only ratios matter).
        num_terms: Sample size n, ``1 <= n <= N``.

    Returns:
        Probabilities, shape ``(N,)``, dtype and device of ``sizes``; the arithmetic is float64.

    Note:
        Algorithm 1 of the paper tries every number t of certain terms and keeps the best. The valid t form an
        interval up to n - 1 and the error does not fall along it, so the smallest is the optimum, without a search.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.1 and Algorithm 1.

    Example:
        >>> proportional_inclusion_probs(torch.tensor([6.0, 2.0, 1.0, 1.0]), num_terms=2)
        tensor([1.0000, 0.5000, 0.2500, 0.2500])
    """
    values = relative(as_magnitudes(sizes, "sizes"))
    check_num_terms(num_terms, len(values))
    if int((values > 0).sum()) <= num_terms:
        return _top(values, num_terms).to(sizes.dtype)
    return capped_proportional(values, num_terms).to(sizes.dtype)


def collective_inclusion_probs(singular_values: Tensor, num_terms: int, cohort_size: float) -> Tensor:
    r"""Inclusion probabilities that minimise the error of the average over a cohort of C clients.

    Minimises :math:`\sum_i s_i^2 (1 - \pi_i) / (1 + (C - 1)\pi_i)` subject to :math:`\sum_i \pi_i = n`. The solution is
    given by a water level L, :math:`\pi_i = \operatorname{clip}((s_i / L - 1) / (C - 1), 0, 1)`: terms below L are
    never drawn, terms above C L always. The expected number of terms falls with L, piecewise between the 2N break
    points :math:`s_i` and :math:`s_i / C`. A bracketed Newton iteration finds the right piece, on which L has a closed
    form.

    Args:
        singular_values: Non-negative, shape ``(N,)``, any order, any unit (only ratios matter).
        num_terms: Sample size n, ``1 <= n <= N``.
        cohort_size: Number of clients C whose terms are averaged; any real number >= 1. With one client (C below
            1 + 1e-6) the optimum is top-n, as it is for any C when :math:`s_n \ge C s_{n+1}`.

    Returns:
        Probabilities in ``[0, 1]``, shape ``(N,)``, dtype and device of ``singular_values``; float64 arithmetic.

    Note:
        Algorithm 2 of the paper, as printed, has the wrong sign in line 30 and always returns top-n; with the sign
        corrected it finds the same optimum by trying all O(N n) active sets. As C goes to infinity, the probabilities
        tend to those of :func:`proportional_inclusion_probs`.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.2 and Algorithm 2.

    Example:
        >>> collective_inclusion_probs(torch.tensor([3.0, 2.0, 1.0]), num_terms=2, cohort_size=3)
        tensor([1.0000, 0.8333, 0.1667])
    """
    values = as_magnitudes(singular_values, "singular_values")
    check_num_terms(num_terms, len(values))
    COHORT_SIZE("cohort_size", cohort_size)
    # numpy: at these sizes a torch operation takes longer to launch than to run.
    array = values.cpu().numpy()
    array = array / max(array.max(), TINY)
    ordered = np.sort(array)
    ordered = ordered[ordered.searchsorted(SMALLEST) :]
    if len(ordered) <= num_terms or cohort_size - 1 < ONE_CLIENT_TOLERANCE:
        return _top(relative(values), num_terms).to(singular_values.dtype)
    # Newton's method for the level, kept within a bracket; exact once it is on the right piece.
    extra, size, ladder = cohort_size - 1, len(ordered), ordered.tolist()
    low, high = max(ladder[0] / cohort_size, TINY), ladder[-1]  # all terms certain; none drawn
    level = min(max(low, float(ordered.sum()) / (num_terms * extra + size)), high)
    before, solved = (-1, -1), False
    for _ in range(200):
        # The interior is ordered[first:last]; the certain terms follow it.
        first, last = bisect.bisect_left(ladder, level), bisect.bisect_left(ladder, cohort_size * level)
        if solved and (first, last) == before:
            break
        # Sums of the interior itself: a difference of prefix sums loses the tail of a steep spectrum.
        mass, count, left = float(ordered[first:last].sum()), last - first, num_terms - (size - last)
        if left * extra * level > mass - count * level:
            high = level
        else:
            low = level
        if count == left == 0 or high <= low * (1 + 4e-16):
            break
        slope = left * extra + count
        newton = mass / slope if slope > 0 else 0.0
        # Strictly inside, or Newton's method could jump between the ends of the bracket forever.
        before, solved = (first, last), newton == level or low < newton < high
        level = newton if solved else math.sqrt(low) * math.sqrt(high)
    probs = ((array / level - 1) / extra).clip(0.0, 1.0)
    if last < size:  # certain, despite rounding
        probs[array >= ladder[last]] = 1.0
    return torch.from_numpy(probs).to(singular_values)


def collective_multipliers(inclusion_probs: Tensor, cohort_size: float) -> Tensor:
    r"""Auxiliary multipliers :math:`\omega_i = C / (1 + (C - 1) \pi_i)`, optimal for the given probabilities.

    They lie in ``[1, C]`` for C clients, any real number >= 1, and have the dtype and device of the probabilities. A
    term that is never drawn gets C, the limit of the formula, which is never used.

    Reference:
        Korzhenkov & Louizos (2024), Theorem 3.2, Eq. (8).

    Example:
        >>> collective_multipliers(torch.tensor([1.0, 0.5, 0.0]), cohort_size=3)
        tensor([1.0000, 1.5000, 3.0000])
    """
    COHORT_SIZE("cohort_size", cohort_size)
    return cohort_size / (1 + (cohort_size - 1) * inclusion_probs)


def schatten_inclusion_probs(singular_values: Tensor, num_terms: int, p: float = 4.0) -> Tensor:
    r"""Minimise :math:`\sum_i s_i^p \left[1 - \pi_i + \pi_i (1/\pi_i - 1)^p\right]` under :math:`\sum_i \pi_i = n`.

    The singular values must be non-negative, shape ``(N,)``, in any order and unit; the result is float64. The order p
    of the norm is at least 2, which gives `proportional_inclusion_probs`.

    Note:
        Small terms get probabilities nearly proportional to their values for any p; p determines where that ends. Where
        :math:`s_i^p \ge \beta` a term is certain. When at most n values are positive, they are certain and the first
        zero terms fill the sample up to n.

        The paper solves this by numerical constrained optimisation and finds that unstable. This can be avoided: with
        :math:`x = 1/\pi - 1` each summand is :math:`s^p` times the perspective of a convex function, hence convex in
        :math:`\pi`, and the sum is separable. So a single Lagrange multiplier :math:`\beta` determines all terms, and
        bisection on it finds the optimum for any p.

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

    def probs_at(log_price: float) -> Tensor:
        log_ratio = (log_price - log_powers).clamp_min(0.0)  # below zero a term is certain
        return torch.where(positive, 1 / (1 + _odds_against(log_ratio, p)), 0.0)

    # The logarithm of the multiplier at which the probabilities sum to n; the sum falls as the multiplier rises.
    low = float(log_powers[positive].min())  # everything is certain
    high = float(log_powers[positive].max()) + 1.0
    while float(probs_at(high).sum()) > num_terms:
        low, high = high, high + 2 * (high - low)
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        enough = float(probs_at(middle).sum()) > num_terms
        low, high = (middle, high) if enough else (low, middle)
    # Make the sum exactly n where that costs least, by one Newton step of the constrained problem: close to certainty
    # the objective is so flat that different probabilities have the same floating-point price.
    probs = probs_at(high)
    inner = (probs > 0) & (probs < 1)
    odds = 1 / probs[inner] - 1
    log_room = 2 * probs[inner].log() - log_powers[inner] - (odds ** (p - 2) + odds ** (p - 1)).log()
    room = (log_room - log_room.max()).exp() if len(log_room) else log_room
    corrected = probs.clone()
    corrected[inner] -= (probs.sum() - num_terms) * room / room.sum()
    return corrected.clamp(0.0, 1.0)


def _odds_against(log_ratio: Tensor, p: float) -> Tensor:
    """Solve p x^(p-1) + (p-1) x^p = e^log_ratio - 1 for x >= 0: Newton from above, on a convex function."""
    target = log_ratio.clamp(max=LARGE).expm1()
    x = torch.minimum((target / p) ** (1 / (p - 1)), (target / (p - 1)) ** (1 / p))
    for _ in range(20):
        excess = p * x ** (p - 1) + (p - 1) * x**p - target
        slope = p * (p - 1) * (x ** (p - 2) + x ** (p - 1))
        x = torch.where(x > 0, x - excess / slope, 0.0).clamp_min(0.0)
    return torch.where(log_ratio > LARGE, ((log_ratio - math.log(p - 1)) / p).exp(), x)


def assignment_probs(scores: Tensor, active: float) -> Tensor:
    r"""Probabilities with the least total variance of the S unbiased averages, one for each model.

    .. math:: p_{ps} = \frac{U_{ps}}{M_p} \min(1, c M_p), \qquad M_p = \sum_s U_{ps}, \qquad \sum_{ps} p_{ps} = m

    minimises :math:`\sum_{ps} U_{ps}^2 / p_{ps}` where no row may sum to more than one and all entries sum to m. The
    row sums are those of `proportional_inclusion_probs` for the sizes M, except
    that m may be any real number.

    Args:
        scores: Scores U, finite and non-negative, e.g. the norm of a weighted update, shape ``(P, S)``, any unit (only
            ratios matter). Scores below 1e-250 times the largest count as zero.
        active: Expected number m of active processors, in ``[0, P]``.

    Returns:
        Probability that each processor trains each model, shape ``(P, S)``, float64. A processor whose scores are all
        zero gets zeros. If at most m rows are positive, each of them sums to one, and the total may fall short of m.

    Note:
        The published closed form leaves two cases undefined: M = 0, where the authors' code divides zero by zero, and
        m = 0. In all other cases the two agree.

    Reference:
        Zhang et al. (2024), "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated Learning", Eq. (5).

    Example:
        >>> assignment_probs(torch.tensor([[6.0, 2.0], [1.0, 0.0], [0.0, 1.0]]), active=2)
        tensor([[0.7500, 0.2500],
                [0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """
    if scores.ndim != 2 or scores.numel() == 0:
        raise ValueError(f"`scores` must have shape (P, S) with P, S >= 1, got shape {tuple(scores.shape)}.")
    values = scores.detach().double()
    wrong = ~((values >= 0) & (values < math.inf))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        value = values[row, column].item()
        raise ValueError(f"`scores` must be finite and non-negative, got {value} of processor {row}, model {column}.")
    if not 0 <= active <= len(values):
        raise ValueError(f"`active` must be in [0, P={len(values)}], the number of processors, got {active}.")
    values = relative(values)
    rows = values.sum(1)
    sizes = relative(rows)
    certain = int((sizes > 0).sum()) <= active
    chance = (sizes > 0).double() if certain else capped_proportional(sizes, active)
    # Divide first: the shares of a row are at most one, whatever its size.
    return values / torch.where(sizes > 0, rows, 1.0)[:, None] * chance[:, None]


def model_joint_probs(processor_joint: Tensor, probs: Tensor, model: int) -> Tensor:
    r"""Joint probabilities that p and q both train model s, if a design draws processors and each then picks a model.

    .. math:: \pi^s_{pq} = \pi_{pq} \frac{p_{ps}}{r_p} \frac{p_{qs}}{r_q} \quad (p \ne q), \qquad
        \pi^s_{pp} = p_{ps}

    with the row sums r, because each drawn processor picks its model independently. The result has shape ``(P, P)``,
    float64; rows and columns of processors that are never drawn are zero.

    Args:
        processor_joint: Joint inclusion probabilities of the processors under the design, shape ``(P, P)``, for
            example from :meth:`~lightning_spectral.designs.JointDesign.joint_inclusion_probs` of the row sums.
        probs: Probability that each processor trains each model, shape ``(P, S)``.
        model: Index s of the model.

    Example:
        >>> both = torch.tensor([[1.0, 0.5], [0.5, 0.5]])
        >>> model_joint_probs(both, torch.tensor([[0.5, 0.5], [0.5, 0.0]]), model=0)
        tensor([[0.5000, 0.2500],
                [0.2500, 0.5000]], dtype=torch.float64)
    """
    if processor_joint.shape != (len(probs), len(probs)):
        expected = f"({len(probs)}, {len(probs)})"
        raise ValueError(f"`processor_joint` must have shape {expected}, got {tuple(processor_joint.shape)}.")
    rows = probs.double().sum(1)
    picks = probs[:, model].double() / torch.where(rows > 0, rows, 1.0)
    joint = processor_joint.double() * torch.outer(picks, picks)
    return joint.fill_diagonal_(0.0) + probs[:, model].double().diag()
