r"""Designs that need no fit: Brewer's method, and two with few possible samples, in exact integer arithmetic.

A design whose samples and their probabilities can be listed needs no fit and no rejection: draw a number in
[0, 1) and look up the sample. Here probabilities are whole multiples of :math:`2^{-50}`, about 1e-15, so that
sums, differences and comparisons are exact, and so are sample sizes and inclusion probabilities in any order of
operations.

Systematic sampling lays the probabilities end to end and picks the terms that a comb of unit spacing hits: those whose
interval contains one of the points :math:`u, u + 1, \dots, u + n - 1` for a single uniform u. No interval is longer
than one, so no term is drawn twice.

A draw takes `open_terms` of the inclusion probabilities, or what follows from them; a number of independent samples;
and a generator, its only source of randomness. It returns term indices, sorted in each row, int64, of shape
``(num_samples, n)``, on the generator's device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.functional.checks import check_num_samples
from lightning_spectral.functional.sampling.open_terms import OpenTerms, in_chunks, open_terms


def draw_brewer(parts: OpenTerms, num_samples: int, generator: torch.Generator) -> Tensor:
    r"""Draw independent samples by Brewer's draw-by-draw procedure, all samples at once.

    With r terms still to draw and R the sum of the probabilities of the terms not drawn yet, the next one is
    i with probability proportional to

    .. math:: \pi_i \, \frac{R - \pi_i}{R - r \pi_i}
            = \pi_i \, \frac{r - 1 + e + (1 - \pi_i)}{e + r (1 - \pi_i)}, \qquad e = R - r,

    where :math:`e` is the sum of :math:`1 - \pi` over the terms already drawn. The right-hand side is what is computed:
    it only adds positive numbers, so probabilities near 0 and 1 keep full precision. The time is proportional to
    ``num_samples`` N n.

    Reference:
        Brewer (1975), Australian Journal of Statistics 17, 166-172, for n = 2 and beyond; Tillé (2006),
        Sampling Algorithms.

    Example:
        >>> draw_brewer(open_terms(torch.tensor([1.0, 0.0, 1.0])), 1, torch.Generator())
        tensor([[0, 2]])
    """
    probs = parts.probs.to(generator.device)
    complement = 1 - probs

    def draw(size: int) -> Tensor:
        available = probs.expand(size, -1).clone()
        drawn_complement = probs.new_zeros(size, 1)
        drawn = torch.empty(size, parts.num_terms, dtype=torch.int64, device=probs.device)
        for k in range(parts.num_terms):
            weights = brewer_weights(complement, drawn_complement, parts.num_terms - k).mul_(available)
            ends = weights.cumsum(1)
            point = torch.rand(size, 1, generator=generator, device=probs.device, dtype=torch.float64)
            chosen = torch.searchsorted(ends, point * ends[:, -1:], right=True)
            drawn[:, k] = chosen[:, 0]
            available.scatter_(1, chosen, 0.0)
            drawn_complement += complement[chosen]
        return drawn

    return parts.samples(in_chunks(draw, num_samples, len(probs)))


def brewer_weights(complement: Tensor, drawn_complement: Tensor, left: int) -> Tensor:
    r"""Factors ``(num_samples, N_open)`` by which Brewer's method multiplies the probabilities; one at the last draw.

    ``drawn_complement``, shape ``(num_samples, 1)``, is the sum of the complement :math:`1 - \pi` over the terms
    already drawn, whose own factors mean nothing; ``left`` counts the terms still to draw, including this one.
    """
    return (drawn_complement + complement + (left - 1)).div_(drawn_complement + left * complement)


# Probability one in units; 2^50 * n fits into 64 bits for n < 8192.
ONE = 2**50


class Support(NamedTuple):
    """All samples that a design can draw.

    Attributes:
        samples: Term indices, sorted in each row, int64, shape ``(M, n)``.
        units: Probability of each sample in units of 2^-50, positive, int64, shape ``(M,)``, with sum 2^50.
    """

    samples: Tensor
    units: Tensor


def whole_units(parts: OpenTerms) -> Tensor:
    """Inclusion probabilities of the open terms in units of 2^-50, int64, shape ``(N_open,)``, with the exact sum."""
    if parts.num_terms * ONE >= 2**63:
        raise ValueError(f"This design draws at most 8191 open terms, got {parts.num_terms}; use ConditionalPoisson().")
    units = (parts.probs * ONE).round().long()
    # Rounding left the sum a few units off. Terms with the largest variance take one each, as often as needed.
    excess = int(units.sum()) - parts.num_terms * ONE
    by_variance = (parts.probs - 0.5).abs().argsort()
    count = max(1, len(units))
    shares = torch.full_like(units, abs(excess) // count)
    shares[by_variance[: abs(excess) % count]] += 1
    return units - shares if excess > 0 else units + shares


def draw_from_support(support: Support, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw independent samples from a list of possible ones."""
    check_num_samples(num_samples)
    device = generator.device
    point = torch.randint(ONE, (num_samples,), generator=generator, device=device)
    chosen = torch.searchsorted(support.units.to(device).cumsum(0), point, right=True)
    return support.samples.to(device)[chosen]


def support_joint_probs(support: Support, num_total: int) -> Tensor:
    r"""Joint inclusion probabilities :math:`P(i, j \in I)`, shape ``(N, N)``, float64: a sum over possible samples."""
    drawn = torch.zeros(len(support.samples), num_total, dtype=torch.float64).scatter_(1, support.samples, 1.0)
    # Multiples of 2^-50 up to one: these sums are exact in float64.
    return drawn.T @ (drawn * (support.units.double() / ONE)[:, None])


def minimum_support(inclusion_probs: Tensor) -> Support:
    """The samples of the minimum support design, at most one for each term, and their probabilities.

    While terms are open, take the n terms with the most probability left as one sample. Give it as much probability as
    possible: until one of its terms is used up, or until one of the other terms must be in every sample from then on.
    Each step settles a term. Ties are broken by position, so that the same input gives the same samples everywhere.

    The inclusion probabilities, shape ``(N,)``, must sum to an integer n within 1e-6 n. Entries closer than 1e-13 to 0
    or 1 count as 0 or 1; all others are exact within 2e-15.

    Reference:
        Deville & Tillé (1998), Biometrika 85, 89-101; Tillé (2006), Sampling Algorithms.

    Example:
        >>> minimum_support(torch.tensor([0.75, 0.5, 0.5, 0.25])).samples
        tensor([[0, 1],
                [0, 2],
                [2, 3]])
    """
    parts = open_terms(inclusion_probs)
    if parts.num_terms == 0:
        return Support(parts.certain[None], torch.tensor([ONE]))
    # Of the probability `left` that is not assigned yet, each term needs `needed` and can do without `spare`. Both are
    # integers, so that both stopping conditions are exact.
    needed = whole_units(parts)
    spare, order = ONE - needed, torch.arange(len(needed))
    samples, units, left = [], [], ONE
    while left > 0:
        # Two sorted runs, one of them lowered by a constant: a stable sort is fast on these.
        order = order[needed[order].argsort(descending=True, stable=True)]
        chosen, others = order[: parts.num_terms], order[parts.num_terms :]
        share = min(int(needed[chosen[-1]]), int(spare[others].min()))
        needed[chosen] -= share
        spare[others] -= share
        samples.append(chosen)
        units.append(share)
        left -= share
    return Support(parts.samples(torch.stack(samples)), torch.tensor(units))


def systematic_support(inclusion_probs: Tensor) -> Support:
    """List all samples of systematic sampling in the given order, at most one for each term, and their probabilities.

    The inclusion probabilities are as for :func:`minimum_support`.

    Reference:
        Madow (1949), Annals of Mathematical Statistics 20, 333-354.

    Example:
        >>> systematic_support(torch.tensor([0.5, 0.5, 0.75, 0.25])).samples
        tensor([[0, 2],
                [1, 2],
                [1, 3]])
    """
    parts = open_terms(inclusion_probs)
    if parts.num_terms == 0:
        return Support(parts.certain[None], torch.tensor([ONE]))
    ends = whole_units(parts).cumsum(0)
    # The sample changes where a point of the comb crosses the end of an interval.
    starts = torch.unique(torch.cat([ends.new_zeros(1), ends % ONE]))
    positions = _pick(ends, starts, parts.num_terms)
    return Support(parts.samples(positions), torch.cat([starts, starts.new_tensor([ONE])]).diff())


def _pick(ends: Tensor, start: Tensor, num_terms: int) -> Tensor:
    """Positions under the combs that begin at ``start``, shape (S,); ``ends`` has shape (N,) or (S, N)."""
    points = start[:, None] + ONE * torch.arange(num_terms, device=start.device)
    return torch.searchsorted(ends, points, right=True)


def draw_systematic(
    parts: OpenTerms, units: Tensor, num_samples: int, generator: torch.Generator, *, shuffled: bool
) -> Tensor:
    """Draw independent systematic samples of terms with these `whole_units`, with one uniform number each.

    If ``shuffled``, the terms are in a new random order for each sample: then nearly all sets of terms can occur, not
    only the N or fewer of :func:`systematic_support`.

    Example:
        >>> parts = open_terms(torch.tensor([1.0, 0.0, 1.0]))
        >>> draw_systematic(parts, whole_units(parts), 1, torch.Generator(), shuffled=False)
        tensor([[0, 2]])
    """
    lengths, device = units.to(generator.device), generator.device

    def pick_shuffled(size: int) -> Tensor:
        keys = torch.rand(size, len(lengths), generator=generator, device=device, dtype=torch.float64)
        order = keys.argsort(dim=1)
        starts = torch.randint(ONE, (size,), generator=generator, device=device)
        return order.gather(1, _pick(lengths[order].cumsum(1), starts, parts.num_terms))

    if shuffled:
        return parts.samples(in_chunks(pick_shuffled, num_samples, len(lengths)))
    check_num_samples(num_samples)
    starts = torch.randint(ONE, (num_samples,), generator=generator, device=device)
    return parts.samples(_pick(lengths.cumsum(0), starts, parts.num_terms))
