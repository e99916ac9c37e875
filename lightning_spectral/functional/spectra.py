"""Weights as sums of singular terms: how they are factorised, given a spectrum worth training, averaged and trained."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, Whole
from lightning_spectral.functional.checks import as_magnitudes, check_num_terms, has_values

KEEP_RATIO = Number(above=0, at_most=1, hint="it is the share of singular terms a client holds")
GRANULARITY = Whole(at_least=1)
# A weight in single precision determines its terms no better than this; a wider bound for others would save no time.
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
    precision (`gram_svd`). All others go to LAPACK in the tall orientation, two to three times faster than the wide.

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
    if not wide:
        matrix = matrix.T
    found = gram_svd(matrix) if torch.finfo(weight.dtype).eps >= TOLERANCE else None
    if found is None:
        V, s, Uh = torch.linalg.svd(matrix.T.contiguous(), full_matrices=False)
        found = Uh.T, s, V.T
    U, s, Vh = found
    U, Vh = (U, Vh) if wide else (Vh.T, U.T)
    return Factors(U.contiguous(), s, Vh.contiguous())


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


# Columns of the random subspace beyond those asked for, and how often the matrix and its transpose are applied to it.
# Where the spectrum falls by a factor of 1000 after the terms asked for, as it does once a spectral start has been
# trained for a round, one pass reaches single precision.
SPARE_COLUMNS, PASSES = 8, 2


@torch.no_grad()
def leading_factors(weight: Tensor, num_terms: int) -> tuple[Factors, float] | None:
    r"""The n largest singular terms of a weight in single precision or less, without the others; ``None`` if uncertain.

    A subspace iteration in single precision: a random subspace is multiplied by W and its transpose in turn. An
    orthonormal basis Q of it leaves a small problem in float64, :math:`Q^T W = X\, \mathrm{diag}(s)\, V`, and
    :math:`U = Q X`. With the first n of these terms, let

    .. math:: E = W V^T - U\, \mathrm{diag}(s) .

    The terms found are *exact* singular terms of :math:`W - E V`, because :math:`U^T E = 0`. So they are accepted if
    :math:`\|E\|_F \le 2^{-23} \|W\|_F`: a weight in single precision is not known better than that. All other terms
    of this matrix together have the norm :math:`\sqrt{\|W - E V\|_F^2 - \sum s_i^2}`, which is returned; where it is
    less than :math:`s_n`, the terms found are the largest ones, and elsewhere the result is ``None``. All of this needs
    orthonormal rows of V, whose products are in error by :math:`2^{-52} \|W\|_F^2 / s_n^2`: also where that is above
    single precision, in terms below :math:`10^{-5} \|W\|_F`, the result is ``None``. The random subspace is the same
    for every weight of a shape, so the result is a function of the weight alone.

    On a device only products and QR decompositions are computed; the small problem is solved on the CPU.

    Reference:
        Halko, Martinsson & Tropp (2011), algorithm 4.4, for the iteration.

    Example:
        >>> factors, rest = leading_factors(torch.diag(torch.tensor([3.0, 2.0, 0.5, 0.0])), num_terms=2)
        >>> factors.s.round(decimals=6), round(rest, 6)
        (tensor([3., 2.], dtype=torch.float64), 0.5)
    """
    matrix = weight_to_matrix(weight.detach())
    if matrix.dtype == torch.float64:
        return None
    wide = matrix.shape[0] <= matrix.shape[1]
    matrix = matrix.float() if wide else matrix.float().T
    num_columns = min(num_terms + SPARE_COLUMNS, len(matrix))
    basis = torch.randn(matrix.shape[1], num_columns, generator=torch.Generator().manual_seed(0)).to(matrix)
    for _ in range(PASSES):
        basis = torch.linalg.qr(matrix.T @ torch.linalg.qr(matrix @ basis).Q).Q
    exact = matrix.double()
    basis = torch.linalg.qr(exact @ basis.double()).Q
    small = basis.T @ exact
    gram = (small @ small.T).cpu()
    if not bool(torch.isfinite(gram).all()):
        return None
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(1)[:, :num_terms].to(small)
    rows = vectors.T @ small
    s = rows.norm(dim=1)
    U, Vh = basis @ vectors, rows / s[:, None]
    residual = (exact @ Vh.T).sub_(U * s).norm()
    figures = exact.norm(), residual, s[-1], s.square().sum(), deviation_from_orthonormal(Vh)
    norm, error, smallest, energy, deviation = torch.stack(figures).tolist()
    rest = math.sqrt(max(norm**2 - error**2 - energy, 0.0))
    if not (error <= TOLERANCE * norm and rest < smallest and deviation <= TOLERANCE):
        return None
    return Factors(*((U, s, Vh) if wide else (Vh.T.contiguous(), s, U.T.contiguous()))), rest


def deviation_from_orthonormal(rows: Tensor) -> Tensor:
    """Frobenius norm of ``rows @ rows.T - I``."""
    products = rows @ rows.T
    products.diagonal().sub_(1.0)
    norm: Tensor = products.norm()
    return norm


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
    """Singular values ``(N,)`` of a weight, float64, and ``u`` and ``v`` as from `absorb`, in the weight's type.

    Those of a weight without values have none either.
    """
    if not has_values(weight):
        (rows, columns), new = weight_to_matrix(weight).shape, weight.new_empty
        num_terms = min(rows, columns)
        return new(num_terms, dtype=torch.float64), new(rows, num_terms), new(num_terms, columns)
    factors = factorize(weight)
    return factors.s, *absorb(factors, weight.dtype)


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


# The spectrum of a random matrix is flat, so a sub-model of a few terms misses most of it, and what a client trains is
# mostly noise. Moving the energy into the first terms changes neither the scale of the weight nor its singular vectors.
TAIL = Number(at_least=0, at_most=1, hint="it multiplies the terms beyond the first ones")
# Fluctuation of the largest eigenvalue of a random matrix about its edge, in units of the Tracy-Widom law. Its mean is
# -1.2 and its standard deviation 1.3; one random matrix in 40,000 exceeds 5, by the tail
# exp(-2/3 s^(3/2)) / (4 sqrt(pi) s^(3/4)).
TRACY_WIDOM = 5.0
# Seven standard deviations of John's statistic above its mean.
SPREAD = 15.0


def concentrated_values(singular_values: Tensor, num_terms: int, tail: float) -> Tensor:
    r"""Move the energy of a descending spectrum into its first n terms, without changing its Euclidean norm; float64.

    :math:`s'_i = \gamma s_i` for :math:`i \le n` and :math:`\gamma f s_i` beyond, with the factor f in [0, 1] and
    :math:`\gamma` such that the norm is unchanged.

    Note:
        Afterwards the best sub-model of n terms misses the share :math:`f^2 T / (H + f^2 T)` of the squared norm, where
        H and T are the original energies of the first n terms and of the others. For a Gaussian matrix, n = N / 10 and
        f = 0.1, that is 4 %, down from 83 %.
    """
    values = _tail_checked(singular_values, num_terms, tail)
    moved = torch.cat([values[:num_terms], tail * values[num_terms:]])
    norm = moved.norm()
    return moved * (values.norm() / norm) if norm > 0 else values


def is_concentrated(singular_values: Tensor, num_terms: int, tail: float, rounding: float = 0.0) -> bool:
    r"""Whether :math:`s_{n+1} \le f s_n` up to rounding, as `concentrated_values` leaves a spectrum.

    By Weyl's inequality, a relative rounding error of the matrix in the Frobenius norm moves no singular value by more
    than this share of the norm.
    """
    values = _tail_checked(singular_values, num_terms, tail)
    if num_terms == len(values):
        return True
    lapack = 10 * len(values) * torch.finfo(torch.float64).eps  # a small multiple of N roundings
    room = (1 + tail) * max(rounding, lapack) * values.norm()
    return bool(values[num_terms] <= tail * values[num_terms - 1] + room)


def _tail_checked(singular_values: Tensor, num_terms: int, tail: float) -> Tensor:
    values = as_magnitudes(singular_values, "singular_values")
    check_num_terms(num_terms, len(values))
    TAIL("tail", tail)
    return values


def looks_random(singular_values: Tensor, shape: tuple[int, int]) -> bool:
    r"""Whether a spectrum could be that of a matrix with independent entries of equal variance.

    By the law of Marchenko and Pastur, the singular values of such an m x k matrix end at :math:`\sigma(\sqrt m + \sqrt
    k)`. Training adds terms beyond this edge or spreads the whole spectrum. The spread is measured by John's statistic,
    :math:`m k \sum s^4 / (\sum s^2)^2 - m - k`; for normal entries its mean is 1 and its standard deviation 2. Both
    must be within what chance allows. A flatter spectrum, such as that of an orthogonal matrix, also passes. A matrix
    of zeros, or with a single row or column, does not, because it has no terms to weigh. For a small matrix the test
    says little.

    Reference:
        Marchenko & Pastur (1967); Johnstone (2001) for the fluctuation of the edge; John (1971) for the statistic.
    """
    values = as_magnitudes(singular_values, "singular_values")
    rows, columns = shape[0] ** 0.5, shape[1] ** 0.5
    energy = float((values**2).sum())
    if min(shape) < 2 or energy == 0.0:
        return False
    variance = energy / (shape[0] * shape[1])
    edge, scale = (rows + columns) ** 2, (rows + columns) * (1 / rows + 1 / columns) ** (1 / 3)
    within_edge = float(values.max()) ** 2 <= variance * (edge + TRACY_WIDOM * scale)
    spread = shape[0] * shape[1] * float((values**4).sum()) / energy**2 - shape[0] - shape[1]
    return bool(within_edge and spread <= SPREAD)


BOUND = "it bounds the {} in units of the nominal one (use float('inf') for no bound)"
TAU = Number(at_least=1, finite=False, hint=BOUND.format("effective learning rate"))
WEIGHT_LR = Number(above=0, finite=False, hint=BOUND.format("learning rate of the weight"))
FEW = 2**22  # multiplications that a GPU does in less time than it takes to start a kernel


def effective_lr_factors(multipliers: Tensor, tau: float) -> Tensor:
    r"""Factors :math:`\min(1, \tau/\omega_i)` in ``(0, 1]`` for the gradients of the two vectors of each term.

    A multiplier scales the gradient of its term's vectors; the factor keeps their effective learning rate below ``tau``
    times the nominal one, at least 1; ``inf`` changes nothing. The bound holds for the step of the two vectors; the
    step of the term in weight space still grows with omega times tau.

    Reference:
        Korzhenkov & Louizos (2024), section 3.3, "Effective learning rate".
    """
    TAU("tau", tau)
    return (tau / multipliers).clamp(max=1.0)


def weight_lr_factors(squared_lengths: Tensor, multipliers: Tensor, bound: float) -> Tensor:
    r"""Factors :math:`\min(1, b / (\omega_i^2 (|u_i|^2 + |v_i|^2)))` for the gradients of the two vectors of each term.

    Their sums of squares are given. A step of plain gradient descent on u, shape ``(c_out, n)``, and v, shape ``(n,
    c_in k)``, with the gradient G of the weight, moves the weight by

    .. math:: -\eta \sum_i \omega_i^2 \big(|v_i|^2\, G \hat v_i^T \hat v_i + |u_i|^2\, \hat u_i \hat u_i^T G\big) ,

    where the hats are unit vectors. Along a term the weight's learning rate is :math:`\omega_i^2(|u_i|^2 + |v_i|^2)`
    times the nominal one, which is :math:`2 \omega_i^2 s_i` for a term that was just drawn. The factor bounds this:
    with bound 1, no direction of the weight is trained faster than in a dense layer with the same learning rate;
    ``inf`` changes nothing.

    Note:
        For orthogonal terms with vectors of equal length, as they are drawn, the bound holds for every direction; with
        unequal lengths, twice the bound holds. If gradients are scaled by the norms of the factors, the rate of
        convergence does not depend on the spectrum (Tong, Ma & Chi 2021). Here gradients are only ever reduced, so that
        small terms stay as stable as they are.
    """
    WEIGHT_LR("bound", bound)
    root = multipliers * squared_lengths.sqrt()  # its square may overflow
    return (bound / root / root).clamp(max=1.0)


def frobenius_decay_products(
    u: Tensor, multipliers: Tensor | None, v: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    r"""Gradients of :math:`\frac12 \|U \Omega V\|_F^2` with respect to both factors, each as two matrices to multiply.

    They are :math:`U\Omega VV^T\Omega` of shape ``(c_out, n)`` and :math:`\Omega U^TU\Omega V` of shape ``(n, c_in
    k)``. Without multipliers, all are 1. The n x n Gram matrices take the fewest multiplications; a GPU starts fewer
    kernels through the matrix itself, and multiplies few numbers in less time than it takes to start one.

    Reference:
        Khodak et al. (2021); Korzhenkov & Louizos (2024), section 3.3. The half is the convention of the published code
        of Niu et al. (2022) and of PyTorch's ``weight_decay``; the text of the 2024 paper omits it.
    """
    left, right = (u, v) if multipliers is None else (u * multipliers, multipliers[:, None] * v)
    if not u.is_cpu and left.numel() * v.shape[1] <= FEW:
        matrix = left @ v
        return (matrix, right.T), (left.T, matrix)
    return (left, v @ right.T), (left.T @ left, v)
