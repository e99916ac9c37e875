r"""Assignment of models to processors: probabilities with the least variance, and joint probabilities.

In a round, a processor trains one model or none. A client with B processors can train B models at once, so P, the
number of processors, is at least the number of clients. S is the number of models.
"""

import math

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.inclusion import capped_proportional, relative


def assignment_probs(scores: Tensor, active: float) -> Tensor:
    r"""Probabilities with the least total variance of the S unbiased averages, one for each model.

    .. math:: p_{ps} = \frac{U_{ps}}{M_p} \min(1, c M_p), \qquad M_p = \sum_s U_{ps}, \qquad \sum_{ps} p_{ps} = m

    minimises :math:`\sum_{ps} U_{ps}^2 / p_{ps}` where no row may sum to more than one and all entries sum to m. The
    row sums are those of :func:`~lightning_spectral.functional.proportional_inclusion_probs` for the sizes M, except
    that m may be any real number.

    Args:
        scores: Scores U, finite and non-negative, e.g. the norm of a weighted update, shape ``(P, S)``, any unit (only
            ratios matter). Scores below 1e-250 times the largest count as zero.
        active: Expected number m of active processors, in ``[0, P]``.

    Returns:
        Probability that each processor trains each model, shape ``(P, S)``, float64. A processor whose scores are all
        zero gets zeros. If at most m rows are positive, each of them sums to one, and the total may fall short of m.

    Note:
        The published closed form leaves two cases undefined: M = 0, where the authors' code divides zero by zero, and
        m = 0. In all other cases the two agree.

    Reference:
        Zhang et al. (2024), "Towards Optimal Heterogeneous Client Sampling in Multi-Model Federated Learning", Eq. (5).

    Example:
        >>> assignment_probs(torch.tensor([[6.0, 2.0], [1.0, 0.0], [0.0, 1.0]]), active=2)
        tensor([[0.7500, 0.2500],
                [0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
    """
    values = _as_scores(scores)
    if not 0 <= active <= len(values):
        raise ValueError(f"`active` must be in [0, P={len(values)}], the number of processors, got {active}.")
    values = relative(values)
    rows = values.sum(1)
    sizes = relative(rows)
    certain = int((sizes > 0).sum()) <= active
    chance = (sizes > 0).double() if certain else capped_proportional(sizes, active)
    # Divide first: the shares of a row are at most one, whatever its size.
    return values / torch.where(sizes > 0, rows, 1.0)[:, None] * chance[:, None]


def _as_scores(scores: Tensor) -> Tensor:
    if scores.ndim != 2 or scores.numel() == 0:
        raise ValueError(f"`scores` must have shape (P, S) with P, S >= 1, got shape {tuple(scores.shape)}.")
    values = scores.detach().double()
    wrong = ~((values >= 0) & (values < math.inf))
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        value = values[row, column].item()
        raise ValueError(f"`scores` must be finite and non-negative, got {value} of processor {row}, model {column}.")
    return values


def model_joint_probs(processor_joint: Tensor, probs: Tensor, model: int) -> Tensor:
    r"""Joint probabilities that p and q both train model s, if a design draws processors and each then picks a model.

    .. math:: \pi^s_{pq} = \pi_{pq} \frac{p_{ps}}{r_p} \frac{p_{qs}}{r_q} \quad (p \ne q), \qquad
        \pi^s_{pp} = p_{ps}

    with the row sums r, because each drawn processor picks its model independently. The result has shape ``(P, P)``,
    float64; rows and columns of processors that are never drawn are zero.

    Args:
        processor_joint: Joint inclusion probabilities of the processors under the design, shape ``(P, P)``, for
            example from :meth:`~lightning_spectral.designs.JointDesign.joint_inclusion_probs` of the row sums.
        probs: Probability that each processor trains each model, shape ``(P, S)``.
        model: Index s of the model.

    Example:
        >>> both = torch.tensor([[1.0, 0.5], [0.5, 0.5]])
        >>> model_joint_probs(both, torch.tensor([[0.5, 0.5], [0.5, 0.0]]), model=0)
        tensor([[0.5000, 0.2500],
                [0.2500, 0.5000]], dtype=torch.float64)
    """
    if processor_joint.shape != (len(probs), len(probs)):
        expected = f"({len(probs)}, {len(probs)})"
        raise ValueError(f"`processor_joint` must have shape {expected}, got {tuple(processor_joint.shape)}.")
    rows = probs.double().sum(1)
    picks = probs[:, model].double() / torch.where(rows > 0, rows, 1.0)
    joint = processor_joint.double() * torch.outer(picks, picks)
    return joint.fill_diagonal_(0.0) + probs[:, model].double().diag()
