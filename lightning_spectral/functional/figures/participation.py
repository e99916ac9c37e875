r"""The variance of an average over the active processors, computed exactly rather than by simulation.

The average of one model is the Horvitz-Thompson sum :math:`\sum_p 1_p x_p / p_p` over its active processors, where
:math:`1_p` indicates whether processor p trains the model and :math:`p_p` is the probability that it does. The three
measures differ in x: weights, weighted losses, or weighted updates.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_probabilities


def step_size_variance(weights: Tensor, probs: Tensor, joint: Tensor | None = None) -> float:
    r"""Measure how much the length of a global step varies from round to round: :math:`E(|H|_1 - 1)^2`.

    :math:`|H|_1 = \sum_p 1_p w_p / p_p` is the sum of the coefficients of a round, which is one on average. Its
    variance is :math:`\sum_p w_p^2 (1/p_p - 1)` for independent draws; for other draws see :func:`sampled_variance`.
    The weights w must be non-negative and sum to one. Processors that have a weight but are never drawn lower the mean
    of the sum by their weight; the square of this bias is included.

    Args:
        weights: Weights w of the processors in the average of one model, shape ``(P,)``.
        probs: Probability that each processor trains the model, shape ``(P,)``.
        joint: Joint inclusion probabilities, shape ``(P, P)``, with ``probs`` on the diagonal, for example from
            :func:`~lightning_spectral.functional.model_joint_probs`. By default, draws are independent.

    Reference:
        Zhang et al. (2024), the participation heterogeneity :math:`Z_p` in the proof of Theorem 4.

    Example:
        >>> step_size_variance(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 1.0]))
        0.25
    """
    total = float(weights.double().sum())
    if bool((weights < 0).any()) or not abs(total - 1) <= 1e-6:
        raise ValueError(f"`weights` must be non-negative and sum to one, got the sum {total:.9g}; divide by it.")
    return sampled_variance(weights, probs, joint)


def sampled_variance(values: Tensor, probs: Tensor, joint: Tensor | None = None) -> float:
    r"""Mean squared error of :math:`\sum_p 1_p x_p / p_p` as an estimate of :math:`\sum_p x_p`.

    .. math:: \sum_{pq} \frac{x_p x_q}{p_p p_q} (\pi_{pq} - p_p p_q) + \Big(\sum_{p_p = 0} x_p\Big)^2

    The values x are weighted, e.g. weight times loss, of any sign and unit. The error, in this unit squared, includes
    the squared bias of values that are never drawn. ``probs`` and ``joint`` are as for :func:`step_size_variance`.

    Reference:
        Horvitz & Thompson (1952), Journal of the American Statistical Association 47, 663-685.

    Example:
        >>> never_together = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
        >>> sampled_variance(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.5]), never_together)
        0.0
    """
    x, p = _checked(values, probs)
    never = p == 0
    bias = float(x[never].sum())
    if joint is None:
        return float((x**2 * (1 / p - 1))[~never].sum()) + bias**2
    covariance = _checked_joint(joint, p) - torch.outer(p, p)
    expanded = torch.where(never, 0.0, x / torch.where(never, 1.0, p))
    return float(expanded @ covariance @ expanded) + bias**2


def sampled_update_variance(norms: Tensor, probs: Tensor) -> float:
    r"""Mean squared error of the average update for independent draws, from the norms of the updates alone.

    .. math:: E \Big\| \sum_p \frac{1_p}{p_p} w_p U_p - \sum_p w_p U_p \Big\|^2 = \sum_p \|w_p U_p\|^2 (1/p_p - 1)

    ``norms`` are those of the weighted updates, shape ``(P,)``. Updates that are never drawn are left out, because the
    bias they add also depends on their directions.

    Reference:
        Zhang et al. (2024), Eq. (13).

    Example:
        >>> sampled_update_variance(torch.tensor([3.0, 1.0, 0.0]), torch.tensor([0.5, 1.0, 0.0]))
        9.0
    """
    x, p = _checked(norms, probs)
    if (x < 0).any():
        raise ValueError(f"`norms` must be non-negative, got {x.min().item()}.")
    drawn = p > 0
    return float((x**2 * (1 / p - 1))[drawn].sum())


def _checked(values: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape != probs.shape:
        raise ValueError(
            f"each processor needs a value and a probability, got {tuple(values.shape)} and {tuple(probs.shape)}."
        )
    p = as_probabilities(probs.double(), "probs")
    x = values.detach().double().cpu()
    if not torch.isfinite(x).all():
        raise ValueError(f"values must be finite, got {x[~torch.isfinite(x)][0].item()}.")
    return x, p


def _checked_joint(joint: Tensor, probs: Tensor) -> Tensor:
    if joint.shape != (len(probs), len(probs)):
        raise ValueError(f"`joint` must have shape ({len(probs)}, {len(probs)}), got {tuple(joint.shape)}.")
    pi = joint.detach().double().cpu()
    if not torch.allclose(pi.diagonal(), probs, rtol=0, atol=1e-6):
        raise ValueError("the diagonal of `joint` must be `probs`; combine them with model_joint_probs.")
    return pi
