r"""The minimum support design: split the inclusion probabilities into at most N samples.

While terms are open, take the n terms with the most probability left as one sample, and give it as much
probability as it can get: until one of its terms is used up, or one of the others can no longer wait because
from now on it must be in every sample. Each step settles a term, so that there are at most as many samples as
terms.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.support import ONE, Support, whole_units


def minimum_support(inclusion_probs: Tensor) -> Support:
    """The samples of the minimum support design and their probabilities.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, with a whole sum n within 1e-6 n. Entries closer than
            1e-13 to 0 or 1 count as 0 or 1, the others are kept within 2e-15.

    Returns:
        At most N samples. Among equal probabilities the first terms come first, so that the same input gives
        the same samples everywhere.

    Raises:
        ValueError: If the input is no vector of probabilities with a whole sum.

    Reference:
        Deville & Tillé (1998), Biometrika 85, 89-101; Tillé (2006), Sampling Algorithms.

    Example:
        >>> minimum_support(torch.tensor([0.75, 0.5, 0.5, 0.25])).samples
        tensor([[0, 1],
                [0, 2],
                [2, 3]])
    """
    parts = open_terms(inclusion_probs)
    if parts.num_terms == 0:
        return Support(parts.certain[None], torch.tensor([ONE]))
    samples, units = _split(whole_units(parts), parts.num_terms)
    return Support(parts.samples(torch.stack(samples)), torch.tensor(units))


def _split(needed: Tensor, num_terms: int) -> tuple[list[Tensor], list[int]]:
    # Of the probability `left` that is not given out yet, each term needs `needed` and can spare `spare`; both
    # are whole numbers, so that "used up" and "cannot wait" are exact.
    spare = ONE - needed
    order = torch.arange(len(needed))
    samples, units, left = [], [], ONE
    while left > 0:
        # A sorted part that fell by a constant and a sorted part that did not: a stable sort is quick on these.
        order = order[needed[order].argsort(descending=True, stable=True)]
        chosen, others = order[:num_terms], order[num_terms:]
        share = min(int(needed[chosen[-1]]), int(spare[others].min()))
        needed[chosen] -= share
        spare[others] -= share
        samples.append(chosen)
        units.append(share)
        left -= share
    return samples, units
