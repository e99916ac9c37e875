"""Brewer's design: one term after the other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.designs.base import Design, FittedDesign
from lightning_spectral.functional.sampling.brewer import draw_one_by_one
from lightning_spectral.functional.sampling.open_terms import OpenTerms, open_terms


@dataclass(frozen=True)
class Brewer(Design):
    """Brewer's draw-by-draw method: exact inclusion probabilities without a fit, in O(N n) for each sample.

    Its law is close to that of :class:`ConditionalPoisson`, which is faster here. It is meant for reproducing the
    comparison of Korzhenkov & Louizos (2024), Table 4. Joint probabilities have no closed form.

    Reference:
        Brewer (1975), Australian Journal of Statistics 17, 166-172.

    Example:
        >>> Brewer().sample(torch.tensor([1.0, 0.0, 1.0]), num_samples=2, generator=torch.Generator())
        tensor([[0, 2],
                [0, 2]])
    """

    def fit(self, inclusion_probs: Tensor) -> "FittedBrewer":
        """Set aside the certain and the impossible terms; there is nothing to fit."""
        return FittedBrewer(open_terms(inclusion_probs))


@dataclass(frozen=True, eq=False)
class FittedBrewer(FittedDesign):
    """Open terms, ready to draw from.

    Attributes:
        parts: The open terms and their inclusion probabilities.
    """

    parts: OpenTerms

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples; see :meth:`FittedDesign.draw`."""
        return draw_one_by_one(self.parts, num_samples, generator)
