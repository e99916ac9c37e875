r"""Brewer's method: draw n terms one by one, corrected so that the inclusion probabilities are exact."""

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.open_terms import OpenTerms, in_chunks, open_terms


def draw_brewer(inclusion_probs: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    r"""Draw independent samples by Brewer's draw-by-draw procedure, all samples at once.

    With r terms still to draw and R the sum of the probabilities of the terms not drawn yet, the next one is
    i with probability proportional to

    .. math:: \pi_i \, \frac{R - \pi_i}{R - r \pi_i}
            = \pi_i \, \frac{r - 1 + e + (1 - \pi_i)}{e + r (1 - \pi_i)}, \qquad e = R - r,

    where :math:`e` is the sum of :math:`1 - \pi` over the terms already drawn. The right-hand side is what is computed:
    it only adds positive numbers, so probabilities near 0 and 1 keep full precision. The time is proportional to
    ``num_samples`` N n.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Entries closer than
            1e-13 to 0 or 1 count as 0 or 1.
        num_samples: Number of draws.
        generator: Source of randomness.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, n)``, on the generator's device.

    Reference:
        Brewer (1975), Australian Journal of Statistics 17, 166-172, for n = 2 and beyond; Tillé (2006),
        Sampling Algorithms.

    Example:
        >>> draw_brewer(torch.tensor([1.0, 0.0, 1.0]), 1, torch.Generator())
        tensor([[0, 2]])
    """
    return draw_one_by_one(open_terms(inclusion_probs), num_samples, generator)


def draw_one_by_one(parts: OpenTerms, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw like :func:`draw_brewer`, from terms that are already prepared."""
    probs = parts.probs.to(generator.device)
    return parts.samples(
        in_chunks(lambda size: _draw_rows(probs, parts.num_terms, size, generator), num_samples, len(probs))
    )


def _draw_rows(probs: Tensor, num_terms: int, num_samples: int, generator: torch.Generator) -> Tensor:
    complement = 1 - probs
    available = probs.expand(num_samples, -1).clone()
    drawn_complement = probs.new_zeros(num_samples, 1)
    drawn = torch.empty(num_samples, num_terms, dtype=torch.int64, device=probs.device)
    for k in range(num_terms):
        left = num_terms - k
        weights = brewer_weights(complement, drawn_complement, left).mul_(available)
        ends = weights.cumsum(1)
        point = torch.rand(num_samples, 1, generator=generator, device=probs.device, dtype=torch.float64)
        chosen = torch.searchsorted(ends, point * ends[:, -1:], right=True)
        drawn[:, k] = chosen[:, 0]
        available.scatter_(1, chosen, 0.0)
        drawn_complement += complement[chosen]
    return drawn


def brewer_weights(complement: Tensor, drawn_complement: Tensor, left: int) -> Tensor:
    r"""Factors ``(num_samples, N_open)`` by which Brewer's method multiplies the probabilities; one at the last draw.

    ``drawn_complement``, shape ``(num_samples, 1)``, is the sum of the complement :math:`1 - \pi` over the terms
    already drawn, whose own factors mean nothing; ``left`` counts the terms still to draw, including this one.
    """
    return (drawn_complement + complement + (left - 1)).div_(drawn_complement + left * complement)
