r"""Systematic sampling: lay the probabilities end to end and pick the terms that a comb of unit spacing hits.

Term i owns the interval between the sums of probabilities before and after it. It is drawn if this interval contains
one of the points :math:`u, u + 1, \dots, u + n - 1` for a single uniform u. No interval is longer than one, so no term
is drawn twice. One random number determines the whole sample.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import check_num_samples
from lightning_spectral.functional.sampling.open_terms import OpenTerms, in_chunks, open_terms
from lightning_spectral.functional.sampling.support import ONE, Support, whole_units


def systematic_support(inclusion_probs: Tensor) -> Support:
    """List all samples of systematic sampling in the given order: at most one for each term.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Entries closer than
            1e-13 to 0 or 1 count as 0 or 1; all others are exact within 2e-15.

    Returns:
        The samples in the order of u, and their probabilities.

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
    inclusion_probs: Tensor, num_samples: int, generator: torch.Generator, *, shuffled: bool = False
) -> Tensor:
    """Draw independent systematic samples, with one uniform number each.

    Args:
        inclusion_probs: As for :func:`systematic_support`.
        num_samples: Number of draws.
        generator: Source of randomness.
        shuffled: Whether to put the terms in a new random order for each sample. Then nearly all sets of terms can
            occur, not only the N or fewer of :func:`systematic_support`.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the generator's device.

    Example:
        >>> draw_systematic(torch.tensor([1.0, 0.0, 1.0]), 2, torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """
    parts = open_terms(inclusion_probs)
    return draw_along(parts, whole_units(parts), num_samples, generator, shuffled=shuffled)


def draw_along(
    parts: OpenTerms, units: Tensor, num_samples: int, generator: torch.Generator, *, shuffled: bool
) -> Tensor:
    """Draw like :func:`draw_systematic`, from terms that are already prepared and their `whole_units`."""
    lengths = units.to(generator.device)
    if not shuffled:
        check_num_samples(num_samples)
        return parts.samples(_pick(lengths.cumsum(0), _starts(num_samples, generator), parts.num_terms))
    return parts.samples(
        in_chunks(lambda size: _pick_shuffled(lengths, parts.num_terms, size, generator), num_samples, len(lengths))
    )


def _starts(num_samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(ONE, (num_samples,), generator=generator, device=generator.device)


def _pick_shuffled(lengths: Tensor, num_terms: int, num_samples: int, generator: torch.Generator) -> Tensor:
    keys = torch.rand(num_samples, len(lengths), generator=generator, device=generator.device, dtype=torch.float64)
    order = keys.argsort(dim=1)
    return order.gather(1, _pick(lengths[order].cumsum(1), _starts(num_samples, generator), num_terms))
