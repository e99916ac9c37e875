r"""The effective number of clients: a compromise between a faithful sub-model and a faithful average.

The error of a client's sub-model is :math:`b^2 + v`, its squared bias plus its variance; that of the average of C
independent clients is :math:`b^2 + v / C`. Any mixture of the two errors is the error of a cohort of another size,

.. math:: \lambda (b^2 + v) + (1 - \lambda)(b^2 + v / C) = b^2 + v / C_{eff} , \qquad
    \frac{1}{C_{eff}} = \lambda + \frac{1 - \lambda}{C} ,

so the probabilities of `collective_inclusion_probs` for :math:`C_{eff}` from 1 to C are all the best compromises. As
:math:`C_{eff}` grows, the client's error never falls and the cohort's never rises.
"""

import math

from torch import Tensor

from lightning_spectral.arguments import Number
from lightning_spectral.functional.checks import COHORT_SIZE, as_magnitudes
from lightning_spectral.functional.sampling.inclusion import collective_inclusion_probs, top_inclusion_probs

SLACK = Number(at_least=0, finite=False, hint="0 is top-n, float('inf') is Collective")

# The bisection ends when the logarithm of the size is known to this accuracy.
ACCURACY = 1e-6


def client_error(singular_values: Tensor, inclusion_probs: Tensor, cohort_size: float) -> Tensor:
    r"""Error :math:`E\|W - \hat W\|_F^2` of one client's sub-model, with the multipliers of `collective_multipliers`.

    :math:`\sum_i s_i^2 \frac{(1 - \pi_i)(1 - \pi_i + C^2 \pi_i)}{(1 + (C - 1)\pi_i)^2}` for any
    real C >= 1; a scalar, float64.

    Example:
        >>> import torch
        >>> client_error(torch.tensor([2.0]), torch.tensor([0.5]), cohort_size=3)
        tensor(2.5000, dtype=torch.float64)
    """
    probs = inclusion_probs.double()
    missing = 1 - probs
    share = missing * (missing + cohort_size**2 * probs) / (1 + (cohort_size - 1) * probs) ** 2
    return (singular_values.double() ** 2 * share).sum()


def effective_cohort_size(singular_values: Tensor, num_terms: int, cohort_size: float, slack: float) -> float:
    """The largest effective cohort for which a single sub-model is almost as close to the weight as possible.

    Args:
        singular_values: Non-negative, shape ``(N,)``, any order, any unit.
        num_terms: Number n of terms that a client holds.
        cohort_size: Number of clients C whose terms are averaged.
        slack: Share by which the squared error of a sub-model may exceed that of the n largest terms: 0 for not at
            all, ``float("inf")`` for any amount.

    Returns:
        A number in ``[1, cohort_size]``, to a relative accuracy of 1e-6 from below.

    Example:
        >>> import torch
        >>> s = 1 / torch.arange(1, 65).double()
        >>> [round(effective_cohort_size(s, 7, 10, slack), 2) for slack in (0.0, 0.05, 0.5, float("inf"))]
        [1.0, 1.75, 4.09, 10.0]
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
