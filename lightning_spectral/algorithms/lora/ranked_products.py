"""The aggregation of raFLoRA: products are averaged rank by rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterRound, OpenAdapter
from lightning_spectral.algorithms.lora.product_means import TruncatedProducts, TruncatedRound, set_factors
from lightning_spectral.functional.spectra import stacked


class RankedRound(TruncatedRound):
    """The clients' i-th terms are averaged over the clients that have so many."""

    def factors_before(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The server's, so that clients that change nothing add exact zeros."""
        return self.opened.B[:, places], self.opened.A[places]

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set the factors of the new product, unless no client has changed any."""
        changes = [self.mean.change(name) for name in "uv"]
        if any(bool(change.any()) for change in changes):
            left, right = (own + change for own, change in zip(self.factors_before(self.places), changes, strict=True))
            shares, kept = self._shares()
            own = (1.0, self.opened.B * kept, self.opened.A)
            set_factors(adapter, *stacked([(1.0, left * shares, right), own]))

    def _shares(self) -> tuple[Tensor, Tensor]:
        """The weight of each column of the clients' factors, and of each term of the server's; float64."""
        weights, held, absolute = self.mean.weights, self.mean.held["u"].double(), self.opened.cohort.absolute
        of_place = held.new_zeros(len(self.opened.A)).index_add_(0, self.places, held)
        step = weights.value if absolute else 1.0
        return step * held / of_place[self.places].clamp(min=1), torch.where(of_place > 0, 1.0 - step, 1.0)


@dataclass(frozen=True)
class RankedProducts(TruncatedProducts):
    """The mean of the products as with `TruncatedProducts`, but rank by rank, over the clients that have the rank.

    The products of the clients' first terms are averaged over all clients, those of their i-th terms over the clients
    of rank i or more. So small clients do not pull the terms that they lack to zero. Terms beyond the ranks of all
    clients of a round are added as they were; but the sum is truncated to the largest rank, in which the smallest of
    them may be lost.

    Reference:
        Wu et al. (2026), raFLoRA.

    Note:
        Written from the description in the paper's abstract. Clients are weighted by their coefficients, as everywhere
        here.
    """

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return RankedRound(opened) if opened.is_mixed else TruncatedRound(opened)
