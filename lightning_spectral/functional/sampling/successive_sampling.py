r"""Successive sampling: draw terms one by one, in proportion to their sizes among those left.

This is exactly the law of ``numpy.random.choice(replace=False, p=...)``, and so of PriSM's sampling: numpy
discards repeats and renormalises, which leaves every *new* item distributed in proportion to size. It is also
the law of the first n arrivals of independent exponential clocks with rates :math:`w_i`, or of Gumbel top-n,
which draws it in one pass, and Wallenius' noncentral hypergeometric law with one item of each kind.

Sizes are given by their logarithms, so that fourth powers of singular values over 15 decades are harmless:
``-inf`` is size zero, drawn only when nothing else is left, and ``+inf`` a term that is always drawn.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lightning_spectral.functional.checks import as_inclusion_probs, check_num_terms
from lightning_spectral.functional.sampling.open_terms import (
    centred_logits,
    count_probabilities,
    in_chunks,
    increasing_root,
    joint_of_all,
    leave_one_out_probabilities,
    leave_two_out_probabilities,
    solve_fixed_point,
)

# Probability of the tails of the n-th arrival time that the quadrature leaves out.
TAIL = 1e-14
# Closer to one than this, an inclusion probability is one as far as a quadrature accurate to 1e-13 can tell.
SNAP = 1e-11
# Numbers in a table of N by N times all times that are evaluated together.
TOGETHER = 2**18
# The window is wider than necessary by at most this many halvings of the interval that bounds it.
BISECTIONS = 16
# Points of an interval that are tried at once.
MOST_INSIDE = 15


def certain_and_competing(log_sizes: Tensor, num_terms: int) -> tuple[Tensor, Tensor]:
    """Masks (N,) of the terms that are always drawn, and of those that compete for the places left."""
    if log_sizes.ndim != 1 or log_sizes.numel() == 0 or torch.isnan(log_sizes).any():
        raise ValueError(
            f"`log_sizes` must have shape (N,) with N >= 1 and no NaN, got {tuple(log_sizes.shape)} with "
            f"{int(torch.isnan(log_sizes).sum())} NaN."
        )
    check_num_terms(num_terms, len(log_sizes))
    certain, positive = log_sizes == math.inf, log_sizes > -math.inf
    if int(certain.sum()) > num_terms:
        raise ValueError(
            f"`log_sizes` must have at most num_terms={num_terms} infinite entries, got {int(certain.sum())}."
        )
    if int(positive.sum()) <= num_terms:
        # Too few positive sizes: take them all, and the first of the others.
        chosen = torch.argsort(positive, descending=True, stable=True)[:num_terms]
        return torch.zeros_like(certain).index_fill_(0, chosen, True), torch.zeros_like(certain)
    return certain, positive & ~certain & (num_terms > int(certain.sum()))


def successive_inclusion_probs(log_sizes: Tensor, num_terms: int) -> Tensor:
    r"""Inclusion probabilities of successive sampling, i.e. of ``numpy.random.choice`` without replacement.

    With exponential arrival times :math:`T_j` of rates :math:`w_j`,

    .. math:: \pi_i = \int_0^\infty w_i e^{-w_i t}\, P\big(\#\{j \ne i : T_j < t\} \le n - 1\big)\, dt,

    by Gauss-Legendre quadrature in log t over a window that almost surely contains the n-th arrival.

    Args:
        log_sizes: Logarithms of the sizes w, shape ``(N,)``, any order; adding a constant to all of them changes
            nothing. ``-inf`` is size zero; such terms are drawn, in the order given, only when fewer than n are
            positive.
        num_terms: Sample size n, ``1 <= n <= N``.

    Returns:
        Inclusion probabilities, shape ``(N,)``, float64 on the device of ``log_sizes``, with sum n; absolute error
        about 1e-12, and small probabilities have small relative errors too.

    Note:
        The result differs from Fog's (2008) approximation of Wallenius' mean, which the paper used and which is off by
        8 % for 7 of 64 sizes :math:`i^{-4}`. It also differs from :math:`n w_i / \sum w`, which can exceed one.

    Reference:
        Niu et al. (2022), PriSM, for the sampling; Wallenius (1963) for the law. Appendix C of Korzhenkov &
        Louizos (2024) calls the two laws different; enumeration shows that they are the same.

    Example:
        >>> successive_inclusion_probs(torch.tensor([2.0, 1.0, 1.0]).log(), num_terms=2)
        tensor([0.8333, 0.5833, 0.5833], dtype=torch.float64)
    """
    return for_competing(log_sizes, num_terms, _competing_probs)


def for_competing(log_sizes: Tensor, num_terms: int, probs_of: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Inclusion probabilities of all terms from those that a function gives to the terms that compete."""
    certain, competing = certain_and_competing(log_sizes, num_terms)
    probs = certain.double()
    if competing.any():
        rates = log_sizes.detach()[competing].double().cpu()
        probs[competing] = probs_of(rates, num_terms - int(certain.sum())).to(probs.device)
    return probs


def arrived(log_rates: Tensor, log_time: float | Tensor) -> Tensor:
    """Probabilities (N,) that exponential clocks with these log rates have rung by a log time; times may be rows."""
    return -torch.expm1(-torch.exp((log_rates + log_time).clamp_max(50.0)))


def quadrature(log_rates: Tensor, num_terms: int) -> tuple[float, list[tuple[float, float]]]:
    """Window in log time that contains the n-th arrival: its start, and its nodes and weights."""
    from scipy.special import roots_legendre  # here, so that a device imports this file without scipy

    def too_early(log_times: Tensor) -> Tensor:
        return _at_times(lambda p: count_probabilities(p, num_terms, len(log_rates)), log_rates, log_times) < TAIL

    def not_too_late(log_times: Tensor) -> Tensor:
        return _at_times(lambda p: count_probabilities(p, 0, num_terms - 1), log_rates, log_times) >= TAIL

    # Before `low` no term has arrived, after `high` the n largest have.
    low = math.log(TAIL) - float(torch.logsumexp(log_rates, 0))
    high = math.log(math.log(num_terms / TAIL)) - float(log_rates.topk(num_terms).values[-1])
    num_inside = min(_num_together(log_rates), MOST_INSIDE)
    start, _ = _switch(too_early, low, high, num_inside)
    _, end = _switch(not_too_late, start, high, num_inside)
    # The integrand varies over one unit of log time, or over less when many sizes are alike and the window is short.
    nodes, weights = roots_legendre(32 + math.ceil(4 * (end - start)))
    middle, half = (start + end) / 2, (end - start) / 2
    return start, [(middle + half * node, half * weight) for node, weight in zip(nodes, weights, strict=True)]


def _competing_probs(log_rates: Tensor, num_terms: int) -> Tensor:
    start, nodes = quadrature(log_rates, num_terms)
    log_times, weights = torch.tensor(nodes, dtype=torch.float64).T
    expected = torch.exp((log_rates + log_times[:, None]).clamp_max(50.0))
    events = 0, num_terms - 1
    in_time = _at_times(lambda p: leave_one_out_probabilities(p, events).squeeze(-2), log_rates, log_times)
    # a term that arrives before the window is among the first n
    probs: Tensor = arrived(log_rates, start) + weights @ (expected * torch.exp(-expected) * in_time)
    return probs.clamp_max(1.0)


def _at_times(evaluate: Callable[[Tensor], Tensor], log_rates: Tensor, log_times: Tensor) -> Tensor:
    """A function of the probabilities of having arrived, at several times: together, as far as memory allows."""
    parts = torch.split(log_times[:, None], _num_together(log_rates))
    return torch.cat([evaluate(arrived(log_rates, part)) for part in parts])


def _num_together(log_rates: Tensor) -> int:
    """Number of times that are evaluated together, which is faster for few terms: calls take longer than sums."""
    return max(1, TOGETHER // len(log_rates) ** 2)


def _switch(before: Callable[[Tensor], Tensor], low: float, high: float, num_inside: int) -> tuple[float, float]:
    """Bracket of the point where ``before`` turns from true to false, by trying ``num_inside`` points at a time."""
    for _ in range(math.ceil(BISECTIONS / math.log2(num_inside + 1))):
        points = torch.linspace(low, high, num_inside + 2, dtype=torch.float64)
        last = int(before(points[1:-1]).cumprod(0).sum())  # of the points that are before it
        low, high = float(points[last]), float(points[last + 1])
    return low, high


def fit_log_sizes(inclusion_probs: Tensor) -> Tensor:
    r"""Logarithms of the sizes whose successive sampling has the given inclusion probabilities.

    Accelerated fixed-point iteration, where :math:`\psi` are the inclusion probabilities of the current sizes:

    .. math::

        \log w_i \leftarrow \log w_i + \log(-\log(1-\pi_i)) - \log(-\log(1-\psi_i))

    The given probabilities, shape ``(N,)``, must sum to an integer n within 1e-6 n.

    Returns:
        Log sizes, shape ``(N,)``, float64 on the CPU, with largest finite entry 0. Probability one (within
        1e-11) gives ``+inf``, zero gives ``-inf``. The implied inclusion probabilities agree within 1e-10.

    Example:
        >>> fit_log_sizes(torch.tensor([1.0, 0.75, 0.25, 0.0], dtype=torch.float64)).exp()
        tensor([   inf, 1.0000, 0.3333, 0.0000], dtype=torch.float64)
    """
    probs, num_terms = as_inclusion_probs(inclusion_probs)
    certain = probs >= 1 - SNAP
    competing = (probs > 0) & ~certain
    missing = num_terms - int(certain.sum())
    log_sizes = torch.where(certain, math.inf, torch.full_like(probs, -math.inf))
    if missing == int(competing.sum()):
        log_sizes[competing] = math.inf
    elif missing > 0:
        # Rounding may leave the sum a little off n; no sizes could reproduce that.
        target = torch.sigmoid(centred_logits(torch.logit(probs[competing]), missing))
        goal = _log_expected(target)

        def residual(log_sizes: Tensor) -> tuple[Tensor, Tensor]:
            implied = _competing_probs(log_sizes, missing)
            return goal - _log_expected(implied), (implied - target).abs().max()

        found, error = solve_fixed_point(residual, goal, (1 - target) * goal.exp(), tolerance=1e-12)
        assert error < 1e-9, f"successive sampling fit stopped at error {error:.1e}"
        log_sizes[competing] = found - found.max()
    return log_sizes


def _log_expected(probs: Tensor) -> Tensor:
    """Logarithm of the expected number of arrivals of clocks that have arrived with these probabilities."""
    return torch.log(-torch.log1p(-probs.clamp_max(1 - 1e-15)))


def draw_successive(log_sizes: Tensor, num_terms: int, num_samples: int, generator: torch.Generator) -> Tensor:
    """Draw exact independent samples by an exponential race: the first n arrivals of clocks with rates w.

    Args:
        log_sizes: Logarithms of the sizes w, shape ``(N,)``, with ``-inf`` and ``+inf`` as in
            :func:`successive_inclusion_probs`.
        num_terms: Sample size n.
        num_samples: Number of draws.
        generator: Source of randomness.

    Returns:
        Term indices, sorted in each row, int64, shape ``(num_samples, num_terms)``, on the generator's device.

    Example:
        >>> draw_successive(torch.tensor([0.0, float("-inf"), 0.0]), 2, 1, torch.Generator())
        tensor([[0, 2]])
    """
    certain, competing = (mask.nonzero()[:, 0] for mask in certain_and_competing(log_sizes, num_terms))
    rates = log_sizes.detach()[competing].double().to(generator.device)

    def race(num_races: int) -> Tensor:
        waits = torch.empty(num_races, len(rates), dtype=torch.float64, device=generator.device)
        log_times = waits.exponential_(generator=generator).log() - rates
        return log_times.topk(num_terms - len(certain), dim=1, largest=False).indices

    winners = in_chunks(race, num_samples, len(rates))
    always = certain.to(generator.device).expand(num_samples, -1)
    return torch.cat([always, competing.to(generator.device)[winners]], dim=1).sort(dim=1).values


def manly_inclusion_probs(log_sizes: Tensor, num_terms: int) -> Tensor:
    r"""Probabilities :math:`\mu_i = 1 - e^{-w_i t}` with t such that they sum to n.

    Treats the time of the n-th arrival as fixed. This is the mean of Wallenius' distribution according to Manly (1974)
    and Fog (2008), and what BiasedUrn's ``meanMWNCHypergeo`` computes at its default precision. The logarithms of the
    sizes w are as for `successive_inclusion_probs`.

    Note:
        The result is up to 8 % off for 7 of 64 sizes :math:`i^{-4}` and far more for fewer and steeper ones, and for
        n = 1 it is not even proportional to size. The function is included to reproduce the paper;
        `successive_inclusion_probs` is exact.

    Reference:
        Manly (1974), Biometrics 30, 281-294; Fog (2008); Korzhenkov & Louizos (2024), Appendix C.

    Example:
        >>> manly_inclusion_probs(torch.tensor([2.0, 1.0, 1.0]).log(), num_terms=2)
        tensor([0.8284, 0.5858, 0.5858], dtype=torch.float64)
    """

    def manly(log_rates: Tensor, left: int) -> Tensor:
        even = math.log(-math.log1p(-left / len(log_rates)))  # log t if all sizes were one
        low, high = even - float(log_rates.max()), even - float(log_rates.min())

        def arrivals(log_time: float) -> tuple[Tensor, Tensor]:
            expected = torch.exp((log_rates + log_time).clamp_max(50.0))
            return arrived(log_rates, log_time), expected * torch.exp(-expected)

        return arrived(log_rates, increasing_root(arrivals, low, low, high, left))

    return for_competing(log_sizes, num_terms, manly)


def successive_joint_probs(log_sizes: Tensor, num_terms: int) -> Tensor:
    r"""Joint inclusion probabilities of successive sampling, shape ``(N, N)``, float64 on the CPU.

    Two terms are both drawn if at most n - 2 others have arrived when the later of the two arrives:

    .. math:: \pi_{ij} = \int_0^\infty \frac{d}{dt}\big[F_i(t) F_j(t)\big]\, P(N_{-ij}(t) \le n - 2)\, dt

    with :math:`F_i(t) = 1 - e^{-w_i t}`, by the quadrature of
    `successive_inclusion_probs`, with an absolute error of about 1e-12. It takes
    about fifty matrix products: about a second for 512 terms. The logarithms of the sizes w are as for that function.

    Example:
        >>> successive_joint_probs(torch.tensor([2.0, 1.0, 1.0]).log(), num_terms=2)[0, 1]
        tensor(0.4167, dtype=torch.float64)
    """
    sure, racing = certain_and_competing(log_sizes, num_terms)
    marginals = successive_inclusion_probs(log_sizes, num_terms).cpu()
    rates, places = log_sizes.detach()[racing].double().cpu(), num_terms - int(sure.sum())
    among_open = torch.zeros(len(rates), len(rates), dtype=torch.float64)
    if places > 1 and len(rates):
        start, nodes = quadrature(rates, places)
        before = arrived(rates, start)
        among_open = torch.outer(before, before)  # both arrive before the window, and so are among the first n
        for log_time, weight in nodes:
            present = arrived(rates, log_time)
            log_expected = (rates + log_time).clamp_max(50.0)
            arriving = torch.outer(weight * torch.exp(log_expected - log_expected.exp()), present)
            among_open += (arriving + arriving.T) * leave_two_out_probabilities(present, 0, places - 2)
    return joint_of_all(among_open, marginals, sure.cpu().nonzero()[:, 0], racing.cpu().nonzero()[:, 0])
