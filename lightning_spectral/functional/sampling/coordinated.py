r"""Joint draws for the clients of one group: terms are spread evenly, and each client keeps its own distribution.

Every client still gets exactly n terms, and term i with probability :math:`\pi_i`. But the number of clients that hold
term i is :math:`C\pi_i` rounded down or up, whereas independent draws leave it to chance.
"""

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole
from lightning_spectral.functional.checks import as_inclusion_probs
from lightning_spectral.functional.sampling.open_terms import SNAP


def draw_coordinated(inclusion_probs: Tensor, cohort_size: int, generator: torch.Generator) -> Tensor:
    r"""Deal terms to the clients of one group.

    1. Lay the terms end to end in random order, each :math:`C\pi_i` long: a line of length C n.
    2. From a random start, walk along it in unit steps. Each step copies the term it lands on, so term i gets
       :math:`\lfloor C\pi_i\rfloor` copies or one more, next to each other.
    3. Deal the copies in turn to the clients, in random order. No term has more than C copies, so no client gets two.

    Args:
        inclusion_probs: Shape ``(N,)``, summing to an integer n.
        cohort_size: Number of clients C.
        generator: Source of randomness.

    Returns:
        Term indices, sorted and distinct in each row, int64, shape ``(C, n)``. The rows are not independent.

    Reference:
        Systematic sampling (Madow 1949), applied to clients times terms.

    Example:
        >>> pi = torch.tensor([1.0, 0.5, 0.5])
        >>> draw_coordinated(pi, 4, torch.Generator().manual_seed(0)).flatten().bincount()
        tensor([4, 2, 2])
    """
    Whole(at_least=1)("cohort_size", cohort_size)
    probs, num_terms = as_inclusion_probs(inclusion_probs)
    device = generator.device
    certain = (probs >= 1 - SNAP).nonzero().flatten().to(device)
    rows = certain.repeat(cohort_size, 1)
    if missing := num_terms - len(certain):
        undecided = ((probs > SNAP) & (probs < 1 - SNAP)).nonzero().flatten().to(device)
        order = undecided[torch.randperm(len(undecided), generator=generator, device=device)]
        ends = probs.to(device)[order].cumsum(0)
        ends = ends * (cohort_size * missing / ends[-1])
        start = torch.rand((), generator=generator, device=device, dtype=torch.float64)
        steps = start + torch.arange(cohort_size * missing, device=device)
        copies = order[torch.searchsorted(ends, steps, right=True).clamp(max=len(order) - 1)]
        clients = torch.randperm(cohort_size, generator=generator, device=device)
        dealt = torch.empty_like(copies).view(cohort_size, missing)
        dealt[clients] = copies.view(missing, cohort_size).T
        rows = torch.cat([rows, dealt], dim=1)
    return rows.sort(dim=1).values


def coordinated_multipliers(inclusion_probs: Tensor, cohort_size: int) -> Tensor:
    r"""Multipliers that minimise the error of the average over C coordinated clients.

    :math:`\omega_i = C\mu_i / (\mu_i^2 + f_i(1 - f_i))` with :math:`\mu_i = C\pi_i` and f its fractional part.

    Args:
        inclusion_probs: Shape ``(N,)``.
        cohort_size: Number of clients C.

    Returns:
        Shape ``(N,)``, float64, in ``(0, C]``; a term that is never drawn gets C.

    Example:
        >>> coordinated_multipliers(torch.tensor([1.0, 0.5, 0.05, 0.0]), cohort_size=10)
        tensor([ 1.,  2., 10., 10.], dtype=torch.float64)
    """
    mean = cohort_size * inclusion_probs.double()
    fraction = mean - mean.floor()
    best = cohort_size * mean / (mean**2 + fraction * (1 - fraction)).clamp_min(1e-300)
    return torch.where(mean > 0, best, float(cohort_size))
