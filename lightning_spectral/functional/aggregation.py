"""The change of a weight that follows from the averaged changes of its singular terms."""

import torch
from torch import Tensor


def weight_change(u: Tensor, v: Tensor, u_change: Tensor, v_change: Tensor) -> Tensor:
    r"""Change of :math:`W = \sum_i u_i v_i^T` when its terms change.

    Computed from the differences, as :math:`\Delta u\,(v + \Delta v) + u\,\Delta v`, rather than as the new product
    minus the old one, so that the result is exactly zero if no term changed.

    Args:
        u: Left vectors before the change, shape ``(c_out, n)``.
        v: Right vectors before the change, shape ``(n, c_in k)``.
        u_change: Averaged change of ``u``, shape ``(c_out, n)``.
        v_change: Averaged change of ``v``, shape ``(n, c_in k)``.

    Returns:
        The change of the weight as a matrix, shape ``(c_out, c_in k)``.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1, step 3.

    Example:
        >>> one = torch.ones(1, 1)
        >>> weight_change(2 * one, 3 * one, one, 0 * one)  # (2 + 1) * 3 - 2 * 3
        tensor([[3.]])
    """
    return torch.cat([u_change, u], dim=1) @ torch.cat([v + v_change, v_change], dim=0)
