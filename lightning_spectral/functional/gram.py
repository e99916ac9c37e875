r"""Singular values from a Gram matrix, with a certificate.

The eigenvectors Q of :math:`G = W W^T` are the left singular vectors of W, and :math:`Q^T W = C` holds the right ones
as rows of length :math:`s_i`. That is up to twice as fast as LAPACK's decomposition of the tall orientation
(``benchmarks/refresh.py``). But G squares the singular values: in float64, singular values below about
:math:`10^{-8} s_1` are lost in rounding. So the result is checked.

Three facts make one check enough. Q is orthonormal, because eigenvectors of a symmetric matrix are. The product is
exact: :math:`Q C = Q Q^T W = W`, however inaccurate Q is. So the only possible error is that the rows of C are not
orthogonal. Their deviation is :math:`R = V_h V_h^T - I`, where :math:`V_h` are the rows scaled to unit length, and
(Ostrowski 1959)

.. math:: |\sigma_i / s_i - 1| \le \|R\|_2 \le \|R\|_F \quad \text{for the true singular values } \sigma_i ,

a *relative* bound, even for the small singular values. A rounding error of :math:`\delta s_1^2` in G makes entry (i, j)
of R up to :math:`\delta s_1^2 / (s_i s_j)`: about 1e-13 for a fresh layer, but too much once the singular values span
five decades.
"""

import torch
from torch import Tensor

# A weight in single precision determines its terms no better than this. A wider bound for narrower types would save no
# time.
TOLERANCE = torch.finfo(torch.float32).eps


def gram_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    r"""Singular value decomposition through the Gram matrix, or ``None`` where that is inaccurate.

    Args:
        matrix: Shape ``(N, M)`` with N <= M, float64, finite. The squares of its entries must be representable in
            float64, as they are for every weight in single precision or less.

    Returns:
        U, s and Vh as from ``torch.linalg.svd(matrix, full_matrices=False)``: s descends, U diag(s) Vh is the matrix
        and U is orthonormal up to float64 rounding, and :math:`\|V_h V_h^T - I\|_F` is at most `TOLERANCE`, which
        bounds the relative error of every singular value. ``None`` if that bound is missed, because the singular values
        span more than about four decades or some are zero, or if the eigenvectors were not found.

    Reference:
        A. Ostrowski (1959), A quantitative formulation of Sylvester's law of inertia, PNAS 45(5), 740-744.

    Example:
        >>> U, s, Vh = gram_svd(torch.tensor([[0.0, 3.0, 0.0], [4.0, 0.0, 0.0]], dtype=torch.float64))
        >>> s
        tensor([4., 3.], dtype=torch.float64)
        >>> gram_svd(torch.ones(2, 3, dtype=torch.float64)) is None  # of rank one
        True
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
    """Frobenius norm of ``rows @ rows.T - I``.

    Example:
        >>> deviation_from_orthonormal(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        8.0
    """
    products = rows @ rows.T
    products.diagonal().sub_(1.0)
    return float(products.norm())
