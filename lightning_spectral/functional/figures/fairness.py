"""How evenly a metric is spread over clients, from one value per client, shape ``(K,)``; NaN if any value is NaN."""

import torch
from torch import Tensor


def decile_means(values: Tensor) -> tuple[float, float]:
    r"""Mean over the tenth of the clients with the lowest values, and over the tenth with the highest.

    Each tenth has :math:`\lceil K / 10 \rceil` of the K clients. For accuracies they are the "worst 10 %" and the
    "best 10 %" of the literature; for losses it is the other way round. NaN if any value is NaN.

    Reference:
        Li et al. (2020), Fair resource allocation in federated learning, Table 1.

    Example:
        >>> decile_means(torch.tensor([0.9, 0.1, 0.5]))
        (0.1..., 0.89...)
    """
    ordered = _checked(values).sort().values  # NaN comes last
    if ordered[-1].isnan():
        return float("nan"), float("nan")
    size = -(-len(ordered) // 10)
    return float(ordered[:size].mean()), float(ordered[-size:].mean())


def jain_index(values: Tensor) -> float:
    r"""Jain's index, :math:`(\sum x)^2 / (K \sum x^2)`: 1 if all values are equal, 1/K if one client has it all.

    Values must be non-negative. The index is 1 if all are zero, NaN if any is NaN.

    Reference:
        Jain, Chiu & Hawe (1984), A quantitative measure of fairness and discrimination for resource allocation.

    Example:
        >>> jain_index(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        0.25
    """
    x = _checked_non_negative(values)
    return 1.0 if (x == 0).all() else float(x.sum() ** 2 / (len(x) * x.square().sum()))


def gini_coefficient(values: Tensor) -> float:
    r"""Gini's coefficient, :math:`\sum_{ij} |x_i - x_j| / (2 K \sum x)`: 0 if all values are equal, at most 1 - 1/K.

    Values must be non-negative. The coefficient is 0 if all are zero, NaN if any is NaN.

    Example:
        >>> gini_coefficient(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        0.75
    """
    x = _checked_non_negative(values).sort().values
    if (x == 0).all():
        return 0.0
    rank = torch.arange(1, len(x) + 1, dtype=torch.float64)
    return float(((2 * rank - len(x) - 1) * x).sum() / (len(x) * x.sum()))


def _checked(values: Tensor) -> Tensor:
    if values.ndim != 1 or not len(values):
        raise ValueError(f"`values` must hold one value for each client, at least one; got {tuple(values.shape)}.")
    return values.detach().double().cpu()


def _checked_non_negative(values: Tensor) -> Tensor:
    x = _checked(values)
    if (x < 0).any():
        raise ValueError(f"`values` must be non-negative, got {x.min().item()}.")
    return x
