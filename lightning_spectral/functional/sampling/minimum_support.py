r"""The minimum support design: split the inclusion probabilities into at most N samples.

While terms are open, take the n terms with the most probability left as one sample. Give it as much probability as
possible: until one of its terms is used up, or until one of the other terms must be in every sample from then on. Each
step settles a term, so there are at most as many samples as terms.
"""

import torch
from torch import Tensor

from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.support import ONE, Support, whole_units


def minimum_support(inclusion_probs: Tensor) -> Support:
    """The samples of the minimum support design and their probabilities.

    Args:
        inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Entries closer than
            1e-13 to 0 or 1 count as 0 or 1; all others are exact within 2e-15.

    Returns:
        At most N samples. Ties are broken by position, so that the same input gives the same samples everywhere.

    Raises:
        ValueError: If the input is not a vector of probabilities with an integer sum.

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
    # Of the probability `left` that is not assigned yet, each term needs `needed` and can do without `spare`. Both are
    # integers, so that both stopping conditions are exact.
    spare = ONE - needed
    order = torch.arange(len(needed))
    samples, units, left = [], [], ONE
    while left > 0:
        # Two sorted runs, one of them lowered by a constant: a stable sort is fast on these.
        order = order[needed[order].argsort(descending=True, stable=True)]
        chosen, others = order[:num_terms], order[num_terms:]
        share = min(int(needed[chosen[-1]]), int(spare[others].min()))
        needed[chosen] -= share
        spare[others] -= share
        samples.append(chosen)
        units.append(share)
        left -= share
    return samples, units
