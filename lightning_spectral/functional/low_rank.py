"""Products of thin factors: averaged, factorised and changed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_spectral.functional.factors import Factors


def compact_svd(left: Tensor, right: Tensor) -> Factors:
    """Singular value decomposition of a product of two thin factors, with ``min(c_out, c_in, K)`` terms, in float64.

    Both factors, ``(c_out, K)`` and ``(K, c_in)``, are reduced by QR first, so that the time grows with
    ``(c_out + c_in) K^2`` rather than with ``c_out c_in``.
    """
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double().T)
    U, s, Vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return Factors(q_left @ U, s, Vh @ q_right.T)


def balanced_factors(left: Tensor, right: Tensor, rank: int, spare: float, eps: float) -> tuple[Tensor, Tensor]:
    """The best approximation of a product by ``rank`` terms, each singular value split evenly between its vectors.

    A term whose singular value is at most ``eps`` times the largest counts as zero: it gets a left vector of zeros and
    a right vector of norm ``spare``. It adds nothing but can still be trained, which it could not with two zero
    vectors. The factors have shapes ``(c_out, rank)`` and ``(rank, c_in)``, float64.
    """
    U, s, Vh = compact_svd(left, right)
    U, s, Vh = U[:, :rank], s[:rank], Vh[:rank]
    is_live, root = s > eps * s[0], s.sqrt()
    return U * (root * is_live), Vh * torch.where(is_live, root, spare)[:, None]


def stacked(products: Sequence[tuple[float, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Factors of a weighted sum of products: all left factors side by side, and all right factors below one another.

    Each product has a weight, a left factor ``(c_out, r)`` and a right factor ``(r, c_in)``; the ranks r may differ.
    """
    left = torch.cat([weight * left.double() for weight, left, _ in products], dim=1)
    return left, torch.cat([right.double() for _, _, right in products])


def weight_change(u: Tensor, v: Tensor, u_change: Tensor, v_change: Tensor) -> Tensor:
    r"""Change of :math:`W = \sum_i u_i v_i^T` when its terms, shapes ``(c_out, n)`` and ``(n, c_in k)``, change.

    Computed from the differences, as :math:`\Delta u\,(v + \Delta v) + u\,\Delta v`, rather than as the new product
    minus the old one, so that the result is exactly zero if no term changed.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1, step 3.
    """
    return torch.cat([u_change, u], dim=1) @ torch.cat([v + v_change, v_change], dim=0)
