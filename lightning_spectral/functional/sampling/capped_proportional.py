r"""Probabilities proportional to size, capped at one, with any given sum.

They are used to draw singular terms (`inclusion.py`, with whole sums) and clients (`assignment.py`, with any sum).
"""

import math

import numpy as np
import torch
from torch import Tensor

# Values below this share of the largest count as zero, because quotients would overflow.
SMALLEST = 1e-250
TINY = float(np.finfo(np.float64).tiny)


def relative(values: Tensor) -> Tensor:
    """Values in units of the largest, with zero for those so small that quotients would overflow."""
    scaled = values / values.max().clamp_min(TINY)
    return torch.where(scaled >= SMALLEST, scaled, 0.0)


def capped_proportional(values: Tensor, total: float) -> Tensor:
    r"""Solve :math:`\pi_i = \min(1, c\,s_i)` with :math:`\sum_i \pi_i = m` for sizes s that are not checked.

    Args:
        values: Sizes in units of the largest, from :func:`relative`, shape ``(N,)``, float64.
        total: Sum m of the probabilities, any real number in ``[0, N_positive)``, with more than m positive sizes.

    Returns:
        Probabilities in ``[0, 1]``, shape ``(N,)``, float64.

    Example:
        >>> capped_proportional(torch.tensor([1.0, 0.25, 0.25], dtype=torch.float64), total=1.25)
        tensor([0.8333, 0.2083, 0.2083], dtype=torch.float64)
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
