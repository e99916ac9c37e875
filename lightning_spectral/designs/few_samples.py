"""Designs with at most N different samples, and systematic sampling in random order."""

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign, Prepared
from lightning_spectral.functional.sampling.open_terms import open_terms
from lightning_spectral.functional.sampling.support import (
    draw_from_support,
    minimum_support,
    support_joint_probs,
    whole_units,
)
from lightning_spectral.functional.sampling.systematic import draw_along, systematic_support


@dataclass(frozen=True)
class Systematic(JointDesign):
    """Systematic sampling in the order of the terms: the cheapest design, with one random number per sample.

    Singular values come sorted, so each sample spreads evenly over the spectrum: of any run of consecutive terms with
    probabilities summing to m it holds m, give or take one. Neighbours are hardly ever drawn together, and there are at
    most N different samples. :class:`RandomSystematic` has neither property.

    Reference:
        Madow (1949), Annals of Mathematical Statistics 20, 333-354.

    Example:
        >>> import torch
        >>> Systematic().joint_inclusion_probs(torch.tensor([0.5, 0.5, 0.5, 0.5]))[0]
        tensor([0.5000, 0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Lay the probabilities end to end."""
        return _fit(inclusion_probs, shuffled=False)

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Exact joint probabilities: a sum over the samples; see :meth:`JointDesign.joint_inclusion_probs`."""
        return support_joint_probs(systematic_support(inclusion_probs), len(inclusion_probs))


@dataclass(frozen=True)
class RandomSystematic(Design):
    """Systematic sampling after a random permutation, drawn anew for each sample.

    Nearly as cheap as :class:`Systematic`, and close to :class:`ConditionalPoisson` in which terms are drawn together.
    The joint probabilities are averages over all orders and have no closed form.

    Reference:
        Hartley & Rao (1962), Annals of Mathematical Statistics 33, 350-374.

    Example:
        >>> import torch
        >>> RandomSystematic().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Prepare the probabilities; see :meth:`Systematic.fit`."""
        return _fit(inclusion_probs, shuffled=True)


def _fit(inclusion_probs: Tensor, *, shuffled: bool) -> FittedDesign:
    parts = open_terms(inclusion_probs)
    return Prepared(draw_along, parts, whole_units(parts), shuffled=shuffled)


@dataclass(frozen=True)
class MinimumSupport(JointDesign):
    """The design with the fewest samples: nearly the opposite of :class:`ConditionalPoisson`.

    The list of samples, at most N, depends only on the inclusion probabilities and is made once, by ``fit``. Clients
    draw from it independently, so several clients of a round may hold exactly the same terms, and most pairs of terms
    never occur together.

    Note:
        R's ``UPminimalsupport`` splits at random for each sample: it has the same inclusion probabilities, but any set
        of terms can occur. This class is the design as published.

    Reference:
        Deville & Tillé (1998), Biometrika 85, 89-101. Korzhenkov & Louizos (2024), Table 4, compare designs.

    Example:
        >>> import torch
        >>> MinimumSupport().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """List the samples; see :func:`~lightning_spectral.functional.minimum_support`."""
        return Prepared(draw_from_support, minimum_support(inclusion_probs))

    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Exact joint probabilities: a sum over the samples; see :meth:`JointDesign.joint_inclusion_probs`."""
        return support_joint_probs(minimum_support(inclusion_probs), len(inclusion_probs))
