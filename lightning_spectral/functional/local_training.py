"""Corrections to a client's gradients: two bounds on learning rates, and Frobenius decay."""

from torch import Tensor

from lightning_spectral.arguments import Number

TAU = Number(
    at_least=1,
    finite=False,
    hint="it bounds the effective learning rate in units of the nominal one (use float('inf') for no bound)",
)
WEIGHT_LR = Number(
    above=0,
    finite=False,
    hint="it bounds the learning rate of the weight in units of the nominal one (use float('inf') for no bound)",
)


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


def weight_lr_factors(u: Tensor, multipliers: Tensor, v: Tensor, bound: float) -> Tensor:
    r"""Factors :math:`\min(1, b / (\omega_i^2 (|u_i|^2 + |v_i|^2)))` for the gradients of the two vectors of each term.

    A step of plain gradient descent on u, shape ``(c_out, n)``, and v, shape ``(n, c_in k)``, with the gradient G of
    the weight, moves the weight by

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
    root = multipliers * (u.square().sum(0) + v.square().sum(1)).sqrt()  # its square may overflow
    return (bound / root / root).clamp(max=1.0)


def squared_frobenius_norm(u: Tensor, multipliers: Tensor, v: Tensor) -> Tensor:
    r"""Squared Frobenius norm of :math:`U \Omega V` from two n x n Gram matrices."""
    scaled = u * multipliers
    return ((scaled.T @ scaled) * (v @ v.T)).sum()


def frobenius_decay_gradients(u: Tensor, multipliers: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gradients of :math:`\frac12 \|U \Omega V\|_F^2` with respect to both factors, without forming the product.

    They are :math:`U\Omega VV^T\Omega` of shape ``(c_out, n)`` and :math:`\Omega U^TU\Omega V` of shape ``(n, c_in
    k)``.

    Reference:
        Khodak et al. (2021); Korzhenkov & Louizos (2024), section 3.3. The half is the convention of the published code
        of Niu et al. (2022) and of PyTorch's ``weight_decay``; the text of the 2024 paper omits it.
    """
    scaled = u * multipliers
    gram_u = (scaled.T @ u) * multipliers
    return scaled @ ((v @ v.T) * multipliers), gram_u @ v
