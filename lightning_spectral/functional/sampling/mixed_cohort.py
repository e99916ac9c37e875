r"""Optimal multipliers for a cohort in which clients hold different numbers of terms.

The server averages :math:`\bar W = \sum_c a_c \hat W_c` over independent clients, with weights :math:`a_c = 1/C`. For
given inclusion probabilities, the error of the i-th term is quadratic in the multipliers and has its minimum at

.. math:: R_i = \frac{1}{1 + \sum_c \pi_{ci}/(1 - \pi_{ci})}, \qquad \omega_{ci} = \frac{R_i}{a_c (1 - \pi_{ci})},

where the total error is :math:`\sum_i s_i^2 R_i`. If some clients are certain to hold a term, they share its weight and
the multipliers of all other clients are zero.
"""

import torch
from torch import Tensor

# A probability closer than this to one counts as one.
CERTAIN = 1e-12


def joint_multipliers(inclusion_probs: Tensor, sizes: Tensor) -> Tensor:
    """Multipliers that minimise the error of the cohort's average, for given inclusion probabilities.

    Args:
        inclusion_probs: One row per group of clients, shape ``(G, N)``, in ``[0, 1]``.
        sizes: Number of clients in each group, shape ``(G,)``, positive.

    Returns:
        Multipliers, shape ``(G, N)``, float64. With one group of C clients they are ``C / (1 + (C - 1) pi)``.

    Example:
        >>> joint_multipliers(torch.tensor([[0.5], [0.25]]), torch.tensor([2.0, 1.0]))
        tensor([[1.8000],
                [1.2000]], dtype=torch.float64)
    """
    probs, counts = _checked(inclusion_probs, sizes)
    sure = (probs >= 1 - CERTAIN).double()
    num_sure = (counts * sure).sum(0)
    total = counts.sum()
    shared = total / ((1 - probs + sure) * (1 + (counts * _odds(probs, sure)).sum(0)))
    return torch.where(num_sure > 0, sure * total / num_sure.clamp_min(1e-300), shared)


def joint_discrepancy(singular_values: Tensor, inclusion_probs: Tensor, sizes: Tensor) -> Tensor:
    r"""Error :math:`E\|W - \bar W\|_F^2` of the cohort's average under `joint_multipliers`.

    Args:
        singular_values: Shape ``(N,)``.
        inclusion_probs: One row per group of clients, shape ``(G, N)``.
        sizes: Number of clients in each group, shape ``(G,)``.

    Returns:
        A scalar, float64, in the squared unit of ``singular_values``.

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
