r"""The distance between the average of a cohort's sub-models and the weight, before any client trains.

All errors are expectations of :math:`\|W - \bar W\|_F^2` over the draw, in the squared unit of the singular values.
Divide by :math:`\sum_i s_i^2` to compare layers.
"""

from torch import Tensor


def cohort_discrepancy(
    singular_values: Tensor, inclusion_probs: Tensor, multipliers: Tensor, weights: Tensor
) -> Tensor:
    r"""Error of :math:`\bar W = \sum_c a_c \hat W_c` over independent clients, each with its own probabilities.

    .. math:: \sum_i s_i^2 \Big[\big(1 - \sum_c a_c\omega_{ci}\pi_{ci}\big)^2
        + \sum_c a_c^2\omega_{ci}^2\pi_{ci}(1 - \pi_{ci})\Big]

    The singular values have shape ``(N,)``, probabilities and multipliers one row per client, ``(C, N)``, and the
    weights a_c, which usually sum to one, ``(C,)``. The result is a scalar, float64.

    Note:
        For C equal clients this is Eq. (7) of Korzhenkov & Louizos (2024); for one client with multipliers 1/pi it is
        Eq. (4). The error depends on the design only through the inclusion probabilities.

    Example:
        >>> import torch
        >>> s, pi = torch.tensor([2.0, 1.0]), torch.tensor([[1.0, 0.5]])
        >>> cohort_discrepancy(s, pi, 1 / pi, torch.ones(1))
        tensor(1., dtype=torch.float64)
    """
    probs, share = inclusion_probs.double(), weights.double()[:, None] * multipliers.double()
    bias = 1 - (share * probs).sum(0)
    variance = (share**2 * probs * (1 - probs)).sum(0)
    return (singular_values.double() ** 2 * (bias**2 + variance)).sum()


def group_discrepancy(
    singular_values: Tensor, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: float
) -> Tensor:
    r"""Error of the plain average of C independent clients with the same probabilities; a scalar, float64.

    All three vectors have shape ``(N,)``; C may be any real number >= 1.

    Reference:
        Korzhenkov & Louizos (2024), Eq. (7).

    Example:
        >>> import torch
        >>> group_discrepancy(torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([2.0]), cohort_size=4)
        tensor(1., dtype=torch.float64)
    """
    probs, omega = inclusion_probs.double(), multipliers.double()
    bias = 1 - omega * probs
    return (singular_values.double() ** 2 * (bias**2 + omega**2 * probs * (1 - probs) / cohort_size)).sum()


def coordinated_discrepancy(
    singular_values: Tensor,
    inclusion_probs: Tensor,
    multipliers: Tensor,
    cohort_size: int,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Error of the average of C clients whose draws are coordinated.

    The number of clients that hold term i is :math:`C\pi_i` rounded down, or up with probability
    :math:`f_i = C\pi_i - \lfloor C\pi_i\rfloor`, so its variance is :math:`f_i(1 - f_i)` instead of
    :math:`C\pi_i(1 - \pi_i)`, and any set of so many clients is as likely to hold the term as any other. Let the
    clients have weights :math:`a_c` with :math:`\sum_c a_c = 1` and :math:`K = 1/\sum_c a_c^2`, and let
    :math:`v_i = f_i(1 - f_i)/C^2`. The share of the average that holds the term then has variance

    .. math:: v_i + \frac{1/K - 1/C}{1 - 1/C} \big[\pi_i(1 - \pi_i) - v_i\big] .

    Args:
        singular_values: Shape ``(N,)``.
        inclusion_probs: Shape ``(N,)``.
        multipliers: Shape ``(N,)``.
        cohort_size: Number of clients C.
        weights: The clients' weights, which sum to one, shape ``(C,)``; by default they are equal.

    Returns:
        A scalar, float64.

    Example:
        >>> import torch
        >>> s, pi = torch.tensor([2.0]), torch.tensor([0.5])
        >>> coordinated_discrepancy(s, pi, torch.tensor([2.0]), cohort_size=4)  # exactly two clients hold it
        tensor(0., dtype=torch.float64)
    """
    pi, omega = inclusion_probs.double(), multipliers.double()
    mean = cohort_size * pi
    fraction = mean - mean.floor()
    variance = fraction * (1 - fraction) / cohort_size**2
    if weights is not None and cohort_size > 1:
        unequal = float((weights.double() ** 2).sum()) - 1 / cohort_size
        variance = variance + unequal / (1 - 1 / cohort_size) * (pi * (1 - pi) - variance)
    return (singular_values.double() ** 2 * ((1 - omega * pi) ** 2 + omega**2 * variance)).sum()


def expected_coverage(inclusion_probs: Tensor) -> Tensor:
    """Expected share of terms that at least one of several independent clients holds; a scalar, float64.

    ``inclusion_probs`` has one row per client, shape ``(C, N)``.

    Example:
        >>> import torch
        >>> expected_coverage(torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]))
        tensor(0.5833, dtype=torch.float64)
    """
    return (1 - (1 - inclusion_probs.double()).prod(0)).mean()
