r"""Joint inclusion probabilities: how likely two terms are to be in the same sample.

They determine the covariance of any sum over a sample, and so its standard error without simulation. Rows sum to
:math:`n \pi_i`, because every sample has n terms.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.conditional_poisson import (
    poisson_conditional_inclusion_probs,
    working_open_terms,
)
from lightning_spectral.functional.sampling.poisson_binomial import count_probabilities, leave_two_out_probabilities
from lightning_spectral.functional.sampling.successive_sampling import (
    arrived,
    certain_and_competing,
    quadrature,
    successive_inclusion_probs,
)


def conditional_poisson_joint_probs(working_probs: Tensor, num_terms: int) -> Tensor:
    r"""Joint inclusion probabilities of conditional Poisson sampling, shape ``(N, N)``, float64.

    .. math:: \pi_{ij} = p_i p_j \, P(N_{-ij} = n - 2) / P(N = n)

    for all pairs, from one matrix product, with an absolute error of about 1e-14. Unlike the usual formula, which
    divides by the difference of the odds of i and j, this one allows ties. The working probabilities p are those of
    :func:`~lightning_spectral.functional.fit_conditional_poisson`.

    Reference:
        Chen, Dempster & Liu (1994), Biometrika 81, 457-469.

    Example:
        >>> conditional_poisson_joint_probs(torch.tensor([1.0, 0.5, 0.5]), num_terms=2)[0]
        tensor([1.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    parts = working_open_terms(working_probs, num_terms)
    marginals = poisson_conditional_inclusion_probs(working_probs, num_terms)
    if parts.num_terms == 0:
        return torch.outer(marginals, marginals)
    p, n = parts.probs, parts.num_terms
    among_open = torch.outer(p, p) * leave_two_out_probabilities(p, n - 2, n - 2) / count_probabilities(p, n, n)
    return _with_certain(among_open, marginals, parts.certain, parts.undecided)


def _with_certain(among_open: Tensor, marginals: Tensor, certain: Tensor, index: Tensor) -> Tensor:
    """The matrix for all terms: a certain term is in every sample; impossible terms stay zero."""
    joint = torch.zeros(len(marginals), len(marginals), dtype=torch.float64)
    joint[index[:, None], index] = among_open
    joint[certain] = marginals
    joint[:, certain] = marginals[:, None]
    return joint.fill_diagonal_(0.0) + marginals.diag()


def successive_joint_probs(log_sizes: Tensor, num_terms: int) -> Tensor:
    r"""Joint inclusion probabilities of successive sampling, shape ``(N, N)``, float64 on the CPU.

    Two terms are both drawn if at most n - 2 others have arrived when the later of the two arrives:

    .. math:: \pi_{ij} = \int_0^\infty \frac{d}{dt}\big[F_i(t) F_j(t)\big]\, P(N_{-ij}(t) \le n - 2)\, dt

    with :math:`F_i(t) = 1 - e^{-w_i t}`, by the quadrature of
    :func:`~lightning_spectral.functional.successive_inclusion_probs`, with an absolute error of about 1e-12. It takes
    about fifty matrix products: about a second for 512 terms. The logarithms of the sizes w are as for that function.

    Example:
        >>> successive_joint_probs(torch.tensor([2.0, 1.0, 1.0]).log(), num_terms=2)[0, 1]
        tensor(0.4167, dtype=torch.float64)
    """
    sure, racing = certain_and_competing(log_sizes, num_terms)
    marginals = successive_inclusion_probs(log_sizes, num_terms).cpu()
    rates, places = log_sizes.detach()[racing].double().cpu(), num_terms - int(sure.sum())
    among_open = _racing_joint(rates, places) if len(rates) else torch.zeros(0, 0, dtype=torch.float64)
    return _with_certain(among_open, marginals, sure.cpu().nonzero()[:, 0], racing.cpu().nonzero()[:, 0])


def _racing_joint(log_rates: Tensor, num_terms: int) -> Tensor:
    start, nodes = quadrature(log_rates, num_terms)
    before = arrived(log_rates, start)
    joint = torch.outer(before, before)  # both arrive before the window, and so are among the first n
    for log_time, weight in nodes:
        present = arrived(log_rates, log_time)
        log_expected = (log_rates + log_time).clamp_max(50.0)
        arriving = torch.outer(weight * torch.exp(log_expected - log_expected.exp()), present)
        joint += (arriving + arriving.T) * leave_two_out_probabilities(present, 0, num_terms - 2)
    return joint if num_terms > 1 else torch.zeros_like(joint)
