"""Systematic sampling, in the given order and in random order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign, JointDesign
from lightning_spectral.functional.sampling.open_terms import OpenTerms, open_terms
from lightning_spectral.functional.sampling.support import support_joint_probs, whole_units
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
        >>> Systematic().joint_inclusion_probs(torch.tensor([0.5, 0.5, 0.5, 0.5]))[0]
        tensor([0.5000, 0.0000, 0.5000, 0.0000], dtype=torch.float64)
    """

    def fit(self, inclusion_probs: Tensor) -> "FittedSystematic":
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
        >>> RandomSystematic().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> "FittedSystematic":
        """Prepare the probabilities; see :meth:`Systematic.fit`."""
        return _fit(inclusion_probs, shuffled=True)


def _fit(inclusion_probs: Tensor, *, shuffled: bool) -> "FittedSystematic":
    parts = open_terms(inclusion_probs)
    return FittedSystematic(parts, whole_units(parts), shuffled)


@dataclass(frozen=True, eq=False)
class FittedSystematic(FittedDesign):
    """Intervals, ready to draw from.

    Attributes:
        parts: The open terms.
        units: Their probabilities in units of 2^-50, int64, shape ``(N_open,)``.
        shuffled: Whether to put the terms in a new random order for each sample.
    """

    parts: OpenTerms
    units: Tensor
    shuffled: bool

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples; see :meth:`FittedDesign.draw`."""
        return draw_along(self.parts, self.units, num_samples, generator, shuffled=self.shuffled)
