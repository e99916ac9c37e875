r"""Measures of spectra, of ways of sampling them, and of clients: how far, how even, how variable.

The discrepancies are expectations of :math:`\|W - \bar W\|_F^2`, the squared distance between the average of a cohort's
sub-models and the weight before any client trains, in the squared unit of the singular values. Divide by
:math:`\sum_i s_i^2` to compare layers.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs, as_magnitudes, as_probabilities


def cohort_discrepancy(
    singular_values: Tensor, inclusion_probs: Tensor, multipliers: Tensor, weights: Tensor
) -> Tensor:
    r"""Error of :math:`\bar W = \sum_c a_c \hat W_c` over independent clients, each with its own probabilities.

    .. math:: \sum_i s_i^2 \Big[\big(1 - \sum_c a_c\omega_{ci}\pi_{ci}\big)^2
        + \sum_c a_c^2\omega_{ci}^2\pi_{ci}(1 - \pi_{ci})\Big]

    The singular values have shape ``(N,)``, probabilities and multipliers one row per client, ``(C, N)``, and the
    weights a_c, which usually sum to one, ``(C,)``. The result is a scalar, float64.

    Note:
        For C equal clients this is Eq. (7) of Korzhenkov & Louizos (2024); for one client with multipliers 1/pi it is
        Eq. (4). The error depends on the design only through the inclusion probabilities.

    Example:
        >>> s, pi = torch.tensor([2.0, 1.0]), torch.tensor([[1.0, 0.5]])
        >>> cohort_discrepancy(s, pi, 1 / pi, torch.ones(1))
        tensor(1., dtype=torch.float64)
    """
    probs, share = inclusion_probs.double(), weights.double()[:, None] * multipliers.double()
    bias = 1 - (share * probs).sum(0)
    variance = (share**2 * probs * (1 - probs)).sum(0)
    return (singular_values.double() ** 2 * (bias**2 + variance)).sum()


def group_discrepancy(
    singular_values: Tensor, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: float
) -> Tensor:
    r"""Error of the plain average of C independent clients with the same probabilities; a scalar, float64.

    All three vectors have shape ``(N,)``; C may be any real number >= 1.

    Reference:
        Korzhenkov & Louizos (2024), Eq. (7).

    Example:
        >>> group_discrepancy(torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([2.0]), cohort_size=4)
        tensor(1., dtype=torch.float64)
    """
    probs, omega = inclusion_probs.double(), multipliers.double()
    bias = 1 - omega * probs
    return (singular_values.double() ** 2 * (bias**2 + omega**2 * probs * (1 - probs) / cohort_size)).sum()


def coordinated_discrepancy(
    singular_values: Tensor,
    inclusion_probs: Tensor,
    multipliers: Tensor,
    cohort_size: int,
    weights: Tensor | None = None,
) -> Tensor:
    r"""Error of the average of C clients whose draws are coordinated.

    The number of clients that hold term i is :math:`C\pi_i` rounded down, or up with probability
    :math:`f_i = C\pi_i - \lfloor C\pi_i\rfloor`, so its variance is :math:`f_i(1 - f_i)` instead of
    :math:`C\pi_i(1 - \pi_i)`, and any set of so many clients is as likely to hold the term as any other. Let the
    clients have weights :math:`a_c` with :math:`\sum_c a_c = 1` and :math:`K = 1/\sum_c a_c^2`, and let
    :math:`v_i = f_i(1 - f_i)/C^2`. The share of the average that holds the term then has variance

    .. math:: v_i + \frac{1/K - 1/C}{1 - 1/C} \big[\pi_i(1 - \pi_i) - v_i\big] .

    Args:
        singular_values: Shape ``(N,)``.
        inclusion_probs: Shape ``(N,)``.
        multipliers: Shape ``(N,)``.
        cohort_size: Number of clients C.
        weights: The clients' weights, which sum to one, shape ``(C,)``; by default they are equal.

    Returns:
        A scalar, float64.

    Example:
        >>> s, pi = torch.tensor([2.0]), torch.tensor([0.5])
        >>> coordinated_discrepancy(s, pi, torch.tensor([2.0]), cohort_size=4)  # exactly two clients hold it
        tensor(0., dtype=torch.float64)
    """
    pi, omega = inclusion_probs.double(), multipliers.double()
    mean = cohort_size * pi
    fraction = mean - mean.floor()
    variance = fraction * (1 - fraction) / cohort_size**2
    if weights is not None and cohort_size > 1:
        unequal = float((weights.double() ** 2).sum()) - 1 / cohort_size
        variance = variance + unequal / (1 - 1 / cohort_size) * (pi * (1 - pi) - variance)
    return (singular_values.double() ** 2 * ((1 - omega * pi) ** 2 + omega**2 * variance)).sum()


def expected_coverage(inclusion_probs: Tensor) -> Tensor:
    """Expected share of terms that at least one of several independent clients holds; a scalar, float64.

    ``inclusion_probs`` has one row per client, shape ``(C, N)``.

    Example:
        >>> expected_coverage(torch.tensor([[1.0, 0.5, 0.0], [1.0, 0.5, 0.0]]))
        tensor(0.5833, dtype=torch.float64)
    """
    return (1 - (1 - inclusion_probs.double()).prod(0)).mean()


def entropy_rank(singular_values: Tensor) -> float:
    r"""Exponential of the Shannon entropy of the spectrum, :math:`2^{-\sum p_i \log_2 p_i}` with :math:`p = s/\sum s`.

    A number in ``[1, N]``; 0 for a zero weight.

    Note:
        The formula printed by Niu et al. (2022) takes the logarithm of a negative number; this is what it must mean.
        Their code computes `participation_rank`.

    Example:
        >>> round(entropy_rank(torch.tensor([1.0, 1.0, 1.0, 0.0])), 6)
        3.0
    """
    shares = _shares(singular_values)
    return float(torch.special.entr(shares).sum().exp()) if shares.sum() > 0 else 0.0


def participation_rank(singular_values: Tensor) -> float:
    r"""Participation ratio :math:`1/\sum p_i^2` with :math:`p = s/\sum s`, the Renyi entropy of order two.

    A number in ``[1, N]``; 0 for a zero weight. In the published code of Niu et al. (2022), the effective rank.

    Example:
        >>> participation_rank(torch.tensor([2.0, 1.0, 1.0]))
        2.6666666666666665
    """
    shares = _shares(singular_values)
    return float(1 / (shares**2).sum()) if shares.sum() > 0 else 0.0


def stable_rank(singular_values: Tensor) -> float:
    r"""Squared Frobenius norm over squared spectral norm, :math:`\sum s_i^2 / s_1^2`: in ``[1, N]``, or 0 for zeros.

    Example:
        >>> stable_rank(torch.tensor([2.0, 1.0, 1.0]))
        1.5
    """
    values = as_magnitudes(singular_values, "singular_values")
    largest = values.max()
    return float(((values / largest) ** 2).sum()) if largest > 0 else 0.0


def _shares(singular_values: Tensor) -> Tensor:
    values = as_magnitudes(singular_values, "singular_values")
    return values / values.sum().clamp_min(torch.finfo(torch.float64).tiny)


def marginal_entropy(inclusion_probs: Tensor) -> float:
    r"""Measure how explorative a strategy is: 0 if the terms are always the same, 1 if all are equally likely.

    The mean entropy of the N Bernoulli variables "term i is in the shard", divided by its largest possible value, that
    of :math:`\pi_i = n / N`; 0 for n = N, where nothing is left to chance. Averaged over the sharded layers of a
    network, this is the paper's ANME. The probabilities, shape ``(N,)``, must sum to an integer n within 1e-6 n.

    Reference:
        Korzhenkov & Louizos (2024), Section 4, "average normalized marginal entropy".

    Example:
        >>> marginal_entropy(torch.tensor([1.0, 0.5, 0.5]))
        0.72598...
    """
    probs, num_terms = as_inclusion_probs(inclusion_probs)
    if num_terms == len(probs):
        return 0.0
    even = torch.full_like(probs, num_terms / len(probs))
    return float(_bernoulli_entropy(probs) / _bernoulli_entropy(even))


def _bernoulli_entropy(probs: Tensor) -> Tensor:
    entropies: Tensor = torch.special.entr(probs) + torch.special.entr(1 - probs)
    return entropies.sum()


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
            `model_joint_probs`. By default, draws are independent.

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
    r"""Mean squared error of :math:`\sum_p 1_p x_p / p_p` as an estimate of :math:`\sum_p x_p`, computed exactly.

    :math:`1_p` indicates whether processor p trains a model, which it does with probability :math:`p_p`:

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
    x, p = _values_and_probs(values, probs)
    never = p == 0
    bias = float(x[never].sum())
    if joint is None:
        return float((x**2 * (1 / p - 1))[~never].sum()) + bias**2
    if joint.shape != (len(p), len(p)):
        raise ValueError(f"`joint` must have shape ({len(p)}, {len(p)}), got {tuple(joint.shape)}.")
    pi = joint.detach().double().cpu()
    if not torch.allclose(pi.diagonal(), p, rtol=0, atol=1e-6):
        raise ValueError("the diagonal of `joint` must be `probs`; combine them with model_joint_probs.")
    expanded = torch.where(never, 0.0, x / torch.where(never, 1.0, p))
    return float(expanded @ (pi - torch.outer(p, p)) @ expanded) + bias**2


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
    x, p = _values_and_probs(norms, probs)
    if (x < 0).any():
        raise ValueError(f"`norms` must be non-negative, got {x.min().item()}.")
    drawn = p > 0
    return float((x**2 * (1 / p - 1))[drawn].sum())


def _values_and_probs(values: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    if values.shape != probs.shape:
        raise ValueError(
            f"each processor needs a value and a probability, got {tuple(values.shape)} and {tuple(probs.shape)}."
        )
    p = as_probabilities(probs.double(), "probs")
    x = values.detach().double().cpu()
    if not torch.isfinite(x).all():
        raise ValueError(f"values must be finite, got {x[~torch.isfinite(x)][0].item()}.")
    return x, p


def decile_means(values: Tensor) -> tuple[float, float]:
    r"""Mean over the tenth of the clients with the lowest values of a metric, and over the tenth with the highest.

    The values have shape ``(K,)``, one per client; a tenth is :math:`\lceil K / 10 \rceil` clients. For accuracies they
    are the "worst 10 %" and the "best 10 %" of the literature; for losses, the other way round. NaN if any is NaN.

    Reference:
        Li et al. (2020), Fair resource allocation in federated learning, Table 1.

    Example:
        >>> decile_means(torch.tensor([0.9, 0.1, 0.5]))
        (0.1..., 0.89...)
    """
    ordered = _one_per_client(values).sort().values  # NaN comes last
    if ordered[-1].isnan():
        return float("nan"), float("nan")
    size = -(-len(ordered) // 10)
    return float(ordered[:size].mean()), float(ordered[-size:].mean())


def wilson_intervals(shares: Tensor, sizes: Tensor) -> Tensor:
    r"""95 % intervals of shares p of n examples, :math:`\frac{p + z^2/2n \pm z\sqrt{p(1-p)/n + z^2/4n^2}}{1 + z^2/n}`.

    Both have shape ``(K,)``; the result has shape ``(K, 2)``, float64, and z is 1.96.

    Reference:
        Wilson (1927), Probable inference, the law of succession, and statistical inference.

    Example:
        >>> wilson_intervals(torch.tensor([0.5]), torch.tensor([10]))
        tensor([[0.2366, 0.7634]], dtype=torch.float64)
    """
    p, n, z = shares.double()[:, None], sizes.double()[:, None], 1.959964
    half = z * (p * (1 - p) / n + (z / n) ** 2 / 4).sqrt()
    return ((p + z**2 / (2 * n) + half * torch.tensor([-1, 1])) / (1 + z**2 / n)).clamp(0, 1)


def jain_index(values: Tensor) -> float:
    r"""Jain's index, :math:`(\sum x)^2 / (K \sum x^2)`: 1 if all values are equal, 1/K if one client has it all.

    Values must be non-negative. The index is 1 if all are zero, NaN if any is NaN.

    Reference:
        Jain, Chiu & Hawe (1984), A quantitative measure of fairness and discrimination for resource allocation.

    Example:
        >>> jain_index(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        0.25
    """
    x = _one_per_client(values, non_negative=True)
    return 1.0 if (x == 0).all() else float(x.sum() ** 2 / (len(x) * x.square().sum()))


def gini_coefficient(values: Tensor) -> float:
    r"""Gini's coefficient, :math:`\sum_{ij} |x_i - x_j| / (2 K \sum x)`: 0 if all values are equal, at most 1 - 1/K.

    Values must be non-negative. The coefficient is 0 if all are zero, NaN if any is NaN.

    Example:
        >>> gini_coefficient(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        0.75
    """
    x = _one_per_client(values, non_negative=True).sort().values
    if (x == 0).all():
        return 0.0
    rank = torch.arange(1, len(x) + 1, dtype=torch.float64)
    return float(((2 * rank - len(x) - 1) * x).sum() / (len(x) * x.sum()))


def _one_per_client(values: Tensor, non_negative: bool = False) -> Tensor:
    if values.ndim != 1 or not len(values):
        raise ValueError(f"`values` must hold one value for each client, at least one; got {tuple(values.shape)}.")
    if non_negative and (values < 0).any():
        raise ValueError(f"`values` must be non-negative, got {values.min().item()}.")
    return values.detach().double().cpu()


def middle(values: Tensor, held: Tensor, share: float) -> Tensor:
    """The mean of each column's held values, without a share of the smallest and the largest; 0 where none is held.

    Values are of shape ``(clients, entries)``, float64. With a share of a half, it is the median.
    """
    ordered = values.masked_fill(~held, torch.inf).sort(dim=0).values
    counts = held.sum(0)
    cut = torch.minimum((counts * share + 1e-9).floor().long(), ((counts - 1) // 2).clamp(min=0))
    ranks = torch.arange(len(values)).unsqueeze(1)
    kept = (ranks >= cut) & (ranks < counts - cut)
    return ordered.masked_fill(~kept, 0.0).sum(0) / (counts - 2 * cut).clamp(min=1)
