r"""Singular values from a Gram matrix, with a certificate.

The eigenvectors Q of :math:`G = W W^T` are the left singular vectors of W, and :math:`Q^T W = C` holds the right ones
as rows of length :math:`s_i`. That is up to twice as fast as LAPACK's decomposition of the tall orientation
(``benchmarks/refresh.py``). But G squares the singular values: in float64, what is below about :math:`10^{-8} s_1` is
lost in its rounding. So the result is checked.

Three facts make one check enough. Q is orthonormal, because eigenvectors of a symmetric matrix are. The rows of C
are exact: :math:`Q C = Q Q^T W = W` however wrong Q may be. So only the rows of C can fail to be orthogonal, by
:math:`R = V_h V_h^T - I`, where :math:`V_h` are the rows scaled to length one, and then (Ostrowski 1959)

.. math:: |\sigma_i / s_i - 1| \le \|R\|_2 \le \|R\|_F \quad \text{for the true singular values } \sigma_i ,

a *relative* bound for the small ones too. Rounding of some :math:`\delta s_1^2` in G makes entry (i, j) of R up to
:math:`\delta s_1^2 / (s_i s_j)`: for a fresh layer some 1e-13, and too much once singular values span five decades.
"""

import torch
from torch import Tensor

# A weight in single precision says no more about its terms. Narrower types get no wider bound: they gain no time by it.
TOLERANCE = torch.finfo(torch.float32).eps


def gram_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    r"""Singular value decomposition by way of the Gram matrix, or ``None`` where that is not accurate.

    Args:
        matrix: Shape ``(N, M)`` with N <= M, float64, finite. Its squares must be numbers of float64 as well, as
            those of every weight in single precision or less are.

    Returns:
        U, s and Vh as of ``torch.linalg.svd(matrix, full_matrices=False)``: s descends, U diag(s) Vh is the matrix
        and U is orthonormal to rounding of float64, and :math:`\|V_h V_h^T - I\|_F` is at most `TOLERANCE`, which
        bounds the relative error of every singular value. ``None`` if that is missed: the singular values span
        more than about four decades, some are zero, or the eigenvectors were not found.

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
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # public, but re-exported without a word
        return None
    # An eigenvalue within its own rounding error decides nothing: spare the work that could only fail.
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
