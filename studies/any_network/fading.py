"""Spectral sharding that forgets: terms held by no client in a round shrink."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

import lightning_spectral as ls
from lightning_spectral.algorithms.spectral.aggregation import LayerMean, MeanOfTerms
from lightning_spectral.protocol.cohort import Cohort


class FadingMean(MeanOfTerms):
    """The mean of terms, from which the terms held by no client lose a share."""

    def __init__(self, fading: float, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None) -> None:
        super().__init__(u, v, cohort, held_rows)
        self.fading = fading

    def weight_change(self) -> Tensor:
        """The change from training and from fading, each rounded to the type of the weight."""
        alone, dtype = ~self.visited, self.u.dtype
        lost = self.fading * (self.u[:, alone].double() @ self.v[alone].double())
        return super().weight_change().to(dtype) - lost.to(dtype)


@dataclass(frozen=True)
class FadingTerms(ls.algorithms.TermMeans):
    """`TermMeans` whose server multiplies terms held by no client by 1 - ``fading``, once a round.

    Args:
        fading: Share that these terms lose in a round.
    """

    fading: float = 0.01

    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        """Begin the sums of both vectors of each term."""
        return FadingMean(self.fading, u, v, cohort, held_rows)
