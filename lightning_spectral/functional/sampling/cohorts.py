r"""What is best for a cohort as a whole: multipliers, the effective number of clients, and coordinated draws.

The server averages :math:`\bar W = \sum_c a_c \hat W_c` over independent clients, whose weights a_c sum to one.
The clients of a group g have the same inclusion probabilities and the same multipliers. Let
:math:`A_g = \sum_{c \in g} a_c` be the group's share of the average, and :math:`K_g = A_g^2 / \sum_{c \in g} a_c^2`
Kish's number, that of equally weighted clients whose average varies as much. For given probabilities the error of the
i-th term is quadratic in the multipliers, and has its minimum at

.. math:: R_i = \frac{1}{1 + \sum_g K_g \pi_{gi}/(1 - \pi_{gi})}, \qquad
    \omega_{gi} = \frac{K_g R_i}{A_g (1 - \pi_{gi})},

where the total error is :math:`\sum_i s_i^2 R_i`. If some groups are certain to hold a term, they share its weight and
the multipliers of all other groups are zero. With equal weights, K is the number of clients. Multipliers for each
client could have a lower error still, but they would be proportional to 1 / a_c: a client with a hundredth of another's
examples would train a sub-model with a hundred times its multipliers.

The *effective* number of clients is a compromise between a faithful sub-model and a faithful average. The error of a
sub-model is :math:`b^2 + v`, its squared bias plus its variance; that of the average of C independent clients is
:math:`b^2 + v / C`. Any mixture of the two is the error of a cohort of another size,

.. math:: \lambda (b^2 + v) + (1 - \lambda)(b^2 + v / C) = b^2 + v / C_{eff} , \qquad
    \frac{1}{C_{eff}} = \lambda + \frac{1 - \lambda}{C} ,

so the probabilities of `collective_inclusion_probs` for :math:`C_{eff}` from 1 to C are all the best compromises. As
:math:`C_{eff}` grows, the client's error never falls and the cohort's never rises.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole
from lightning_spectral.functional.checks import COHORT_SIZE, as_inclusion_probs, as_magnitudes
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, top_inclusion_probs
from lightning_spectral.functional.sampling.open_terms import SNAP

# A probability closer than this to one counts as one.
CERTAIN = 1e-12


def kish_size(weights: Sequence[float]) -> float:
    r"""Kish's number of equally weighted clients that average as well, :math:`(\sum_c a_c)^2 / \sum_c a_c^2`.

    Only ratios of the weights matter; if all are zero, all count equally.

    Example:
        >>> kish_size([30.0, 10.0])
        1.6
    """
    if not any(weights):
        return float(len(weights))
    return max(1.0, sum(weights) ** 2 / sum(weight**2 for weight in weights))  # it may be rounded to less


def joint_multipliers(inclusion_probs: Tensor, sizes: Tensor, shares: Tensor | None = None) -> Tensor:
    """Multipliers ``(G, N)`` that minimise the error of the cohort's average, for given inclusion probabilities.

    With one group of C clients they are ``C / (1 + (C - 1) pi)``.

    Args:
        inclusion_probs: One row for each group of clients, shape ``(G, N)``.
        sizes: Number of clients in each group, `kish_size` if their weights differ, shape ``(G,)``.
        shares: Each group's share of the average, in any unit, shape ``(G,)``; by default proportional to ``sizes``.
            The multipliers of a group without a share have no effect, and are one.

    Example:
        >>> joint_multipliers(torch.tensor([[0.5], [0.25]]), torch.tensor([2.0, 1.0]))
        tensor([[1.8000],
                [1.2000]], dtype=torch.float64)
    """
    probs, counts = _checked(inclusion_probs, sizes)
    weights = counts if shares is None else shares.double()[:, None]
    has_weight = weights > 0
    counts = counts * has_weight
    sure = (probs >= 1 - CERTAIN).double()
    sure_weight = (weights * sure).sum(0)
    scale = weights.sum() / weights.where(has_weight, 1.0)
    shared = scale * counts / ((1 - probs + sure) * (1 + (counts * _odds(probs, sure)).sum(0)))
    best = torch.where(sure_weight > 0, sure * weights.sum() / sure_weight.clamp_min(1e-300), shared)
    return best.where(has_weight, 1.0)


def joint_discrepancy(singular_values: Tensor, inclusion_probs: Tensor, sizes: Tensor) -> Tensor:
    r"""Error :math:`E\|W - \bar W\|_F^2` of the cohort's average under `joint_multipliers`; a scalar, float64.

    The singular values have shape ``(N,)``; the other arguments are those of `joint_multipliers`. The groups' shares of
    the average cancel.

    Example:
        >>> joint_discrepancy(torch.tensor([2.0]), torch.tensor([[0.5]]), torch.tensor([1.0]))
        tensor(2., dtype=torch.float64)
    """
    probs, counts = _checked(inclusion_probs, sizes)
    sure = (probs >= 1 - CERTAIN).double()
    left = 1 / (1 + (counts * _odds(probs, sure)).sum(0))
    return (singular_values.double() ** 2 * torch.where(sure.sum(0) > 0, 0.0, left)).sum()


def _odds(probs: Tensor, sure: Tensor) -> Tensor:
    return torch.where(sure > 0, 0.0, probs / (1 - probs + sure))


def _checked(inclusion_probs: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    if inclusion_probs.ndim != 2 or sizes.shape != inclusion_probs.shape[:1]:
        raise ValueError(
            f"`inclusion_probs` must have shape (G, N) and `sizes` (G,), got {tuple(inclusion_probs.shape)} and "
            f"{tuple(sizes.shape)}."
        )
    if not bool((sizes > 0).all()):
        raise ValueError(f"Every group must have clients, got sizes {sizes.tolist()}; leave empty groups out.")
    return inclusion_probs.double(), sizes.double()[:, None]


SLACK = Number(at_least=0, finite=False, hint="0 is top-n, float('inf') is Collective")
ACCURACY = 1e-6  # to which a bisection finds the logarithm of a size


def client_error(singular_values: Tensor, inclusion_probs: Tensor, cohort_size: float) -> Tensor:
    r"""Error :math:`E\|W - \hat W\|_F^2` of one client's sub-model, with the multipliers of `collective_multipliers`.

    :math:`\sum_i s_i^2 \frac{(1 - \pi_i)(1 - \pi_i + C^2 \pi_i)}{(1 + (C - 1)\pi_i)^2}` for any
    real C >= 1; a scalar, float64.
    """
    probs = inclusion_probs.double()
    missing = 1 - probs
    share = missing * (missing + cohort_size**2 * probs) / (1 + (cohort_size - 1) * probs) ** 2
    return (singular_values.double() ** 2 * share).sum()


def effective_cohort_size(singular_values: Tensor, num_terms: int, cohort_size: float, slack: float) -> float:
    """The largest effective cohort for which a single sub-model is almost as close to the weight as possible.

    ``slack`` is the share by which the squared error of a sub-model may exceed that of the ``num_terms`` largest terms:
    0 for not at all, infinity for any amount. The result, in ``[1, cohort_size]``, has a relative accuracy of 1e-6,
    from below.
    """
    SLACK("slack", slack)
    COHORT_SIZE("cohort_size", cohort_size)
    values = as_magnitudes(singular_values, "singular_values")
    least = client_error(values, top_inclusion_probs(values, num_terms), 1.0)
    if slack == 0.0:
        return 1.0

    def is_within(size: float) -> bool:
        probs = collective_inclusion_probs(values, num_terms, size)
        return bool(client_error(values, probs, size) <= (1 + slack) * least)

    if math.isinf(slack) or is_within(cohort_size):
        return float(cohort_size)
    low, high = 0.0, math.log(cohort_size)
    while high - low > ACCURACY:
        middle = (low + high) / 2
        low, high = (middle, high) if is_within(math.exp(middle)) else (low, middle)
    return math.exp(low)


def draw_coordinated(inclusion_probs: Tensor, cohort_size: int, generator: torch.Generator) -> Tensor:
    r"""Deal terms to the C clients of one group.

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

    :math:`\omega_i = C\mu_i / (\mu_i^2 + f_i(1 - f_i))` with :math:`\mu_i = C\pi_i` and f its fractional part, float64,
    in ``(0, C]``; a term that is never drawn gets C.

    Example:
        >>> coordinated_multipliers(torch.tensor([1.0, 0.5, 0.05, 0.0]), cohort_size=10)
        tensor([ 1.,  2., 10., 10.], dtype=torch.float64)
    """
    mean = cohort_size * inclusion_probs.double()
    fraction = mean - mean.floor()
    best = cohort_size * mean / (mean**2 + fraction * (1 - fraction)).clamp_min(1e-300)
    return torch.where(mean > 0, best, float(cohort_size))
