"""Factorisation of a weight into singular terms."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole

KEEP_RATIO = Number(above=0, at_most=1, hint="it is the share of singular terms a client holds")
GRANULARITY = Whole(at_least=1)
# A weight in single precision determines its terms no better than this. A wider bound for narrower types would save no
# time.
TOLERANCE = torch.finfo(torch.float32).eps


class Factors(NamedTuple):
    """The singular value decomposition of a weight, W = U diag(s) Vh, in float64.

    Attributes:
        U: Left singular vectors as columns, shape ``(c_out, N)``.
        s: Singular values in the weight's own unit, shape ``(N,)``, descending.
        Vh: Right singular vectors as rows, shape ``(N, c_in k)``.
    """

    U: Tensor
    s: Tensor
    Vh: Tensor


def weight_to_matrix(weight: Tensor) -> Tensor:
    """View a weight ``(c_out, c_in, k_1, ...)`` as the matrix ``(c_out, c_in k_1 ...)`` whose terms are sampled.

    One row per output channel, as in Niu et al. (2022) and Korzhenkov & Louizos (2024).
    """
    return weight.reshape(weight.shape[0], -1)


def num_terms_for(num_singular: int, keep_ratio: float, granularity: int = 1) -> int:
    """Number of singular terms n = ceil(r N) that a client with keep ratio r holds, of a layer with N terms.

    ``granularity`` rounds n up to a multiple, but not beyond N: processors multiply 16 columns as fast as 7.

    Example:
        >>> num_terms_for(64, 0.2), num_terms_for(64, 0.2, granularity=16)
        (13, 16)
        >>> num_terms_for(100, 0.07)  # 0.07 * 100 is 7.000000000000001 in floats
        7
    """
    KEEP_RATIO("keep_ratio", keep_ratio)
    GRANULARITY("granularity", granularity)
    num_terms = max(1, math.ceil(keep_ratio * num_singular - 1e-9))
    return min(num_singular, math.ceil(num_terms / granularity) * granularity)


def factorize(weight: Tensor) -> Factors:
    """Singular value decomposition of a finite weight ``(c_out, c_in, k_1, ...)``, in float64, on its device.

    A weight in single precision or less is decomposed through its Gram matrix where that is accurate to single
    precision (`gram_svd`). All others go to LAPACK in the tall orientation, which is two to three times faster than the
    wide one.

    Returns:
        `Factors` with ``N = min(c_out, c_in k)`` terms. ``U diag(s) Vh`` equals the weight up to float64 rounding. For
        a float64 weight, the singular values and the orthogonality are accurate to float64 rounding too; for any other,
        each singular value has a relative error of at most ``1.2e-7`` or is accurate to float64 rounding.

    Example:
        >>> factorize(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).s
        tensor([2., 1.], dtype=torch.float64)
    """
    # With a NaN both extremes are NaN; checking these two is many times faster than checking every entry.
    if not bool(torch.isfinite(torch.stack(weight.detach().aminmax())).all()):
        raise ValueError(f"A weight to factorise must be finite, got NaN or infinity in shape {tuple(weight.shape)}.")
    matrix = weight_to_matrix(weight.detach()).double()
    wide = matrix.shape[0] <= matrix.shape[1]
    U, s, Vh = _svd_of_wide(matrix if wide else matrix.T, single=torch.finfo(weight.dtype).eps >= TOLERANCE)
    U, Vh = (U, Vh) if wide else (Vh.T, U.T)
    return Factors(U.contiguous(), s, Vh.contiguous())


def _svd_of_wide(matrix: Tensor, single: bool) -> tuple[Tensor, Tensor, Tensor]:
    if single and (found := gram_svd(matrix)) is not None:
        return found
    U, s, Vh = torch.linalg.svd(matrix.T.contiguous(), full_matrices=False)
    return Vh.T, s, U.T


def gram_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    r"""Singular value decomposition of a wide float64 matrix through its Gram matrix, or ``None`` if inaccurate.

    The eigenvectors Q of :math:`G = W W^T` are the left singular vectors of W, and :math:`Q^T W = C` holds the right
    ones as rows of length :math:`s_i`. That is up to twice as fast as LAPACK's decomposition of the tall orientation
    (``benchmarks/refresh.py``). But G squares the singular values: in float64, those below about :math:`10^{-8} s_1`
    are lost in rounding. So the result is checked.

    Three facts make one check enough. Q is orthonormal, because eigenvectors of a symmetric matrix are. The product is
    exact: :math:`Q C = Q Q^T W = W`, however inaccurate Q is. So the only possible error is that the rows of C are not
    orthogonal. Their deviation is :math:`R = V_h V_h^T - I`, where :math:`V_h` are the rows scaled to unit length, and
    (Ostrowski 1959)

    .. math:: |\sigma_i / s_i - 1| \le \|R\|_2 \le \|R\|_F \quad \text{for the true singular values } \sigma_i ,

    a *relative* bound, even for the small singular values. A rounding error of :math:`\delta s_1^2` in G makes entry
    (i, j) of R up to :math:`\delta s_1^2 / (s_i s_j)`: about 1e-13 for a fresh layer, but too much once the singular
    values span five decades. The squares of the entries must be representable, as they are for every weight in single
    precision or less.

    Returns:
        U, s and Vh as from ``torch.linalg.svd(matrix, full_matrices=False)``, with :math:`\|R\|_F` at most `TOLERANCE`.
        ``None`` if that bound is missed, because the singular values span more than about four decades or some are
        zero, or if the eigenvectors were not found.

    Reference:
        A. Ostrowski (1959), A quantitative formulation of Sylvester's law of inertia, PNAS 45(5), 740-744.
    """
    try:
        eigenvalues, vectors = torch.linalg.eigh(matrix @ matrix.T)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but not re-exported explicitly
        return None
    # If the smallest eigenvalue is lost in rounding, the check below could only fail: skip the work.
    rounding = len(eigenvalues) * torch.finfo(torch.float64).eps
    if not bool(eigenvalues[0] > rounding * eigenvalues[-1]):
        return None
    rows = vectors.T @ matrix
    lengths = rows.norm(dim=1)
    s, order = lengths.sort(descending=True, stable=True)
    Vh = rows[order].div_(s[:, None])
    return (vectors[:, order], s, Vh) if deviation_from_orthonormal(Vh) <= TOLERANCE else None


def deviation_from_orthonormal(rows: Tensor) -> float:
    """Frobenius norm of ``rows @ rows.T - I``."""
    products = rows @ rows.T
    products.diagonal().sub_(1.0)
    return float(products.norm())


def absorb(factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split each singular value evenly between its two vectors, which clients train.

    Returns:
        ``u = U sqrt(s)`` of shape ``(c_out, N)`` and ``v = sqrt(s) Vh`` of shape ``(N, c_in k)``, of the given type.

    Reference:
        Khodak et al. (2021); Korzhenkov & Louizos (2024), section 3.1, step 1.
    """
    root = factors.s.sqrt()
    return (factors.U * root).to(dtype), (root[:, None] * factors.Vh).to(dtype)


def singular_terms(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values ``(N,)`` of a weight, float64, and ``u`` and ``v`` as from `absorb`, in the weight's type."""
    factors = factorize(weight)
    return factors.s, *absorb(factors, weight.dtype)
