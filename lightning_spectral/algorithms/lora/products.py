"""Aggregations that average the products of the clients' factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_spectral.algorithms.fed_avg import sum_of
from lightning_spectral.algorithms.lora.aggregation import (
    ROW_NORM,
    Adapter,
    AdapterAggregation,
    AdapterRound,
    OpenAdapter,
    drawn_rows,
)
from lightning_spectral.functional.spectra import balanced_factors, stacked
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean
from lightning_spectral.sums.exact_mean import largest_within

Tensors = Mapping[str, Tensor]


class TruncatedRound(AdapterRound):
    """The factors of all clients side by side, as terms that are each held by one client: small next to a weight.

    So they are a sum over clients like any other, and each process has the part of those that it trains.
    """

    def __init__(self, opened: OpenAdapter) -> None:
        super().__init__(opened)
        units = sorted((unit for group in opened.cohort.groups.values() for unit in group), key=lambda unit: unit.key)
        ranks = [opened.rank_of(unit) for unit in units]
        columns = torch.split(torch.arange(sum(ranks), device=opened.A.device), ranks)
        self.columns = {unit.key: own for unit, own in zip(units, columns, strict=True)}
        places = [place for rank in ranks for place in range(rank)]
        self.places = torch.tensor(places, dtype=torch.long, device=opened.A.device)
        before = dict(zip("uv", self.factors_before(self.places), strict=True))
        self.mean = MeanChange(before, opened.cohort.total, by_index={"u": 1, "v": 0})

    def factors_before(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """What is subtracted from the clients' factors, whose columns have these places in their own client: zeros."""
        zero = self.opened.A.new_zeros(())
        return zero.expand(len(self.opened.B), len(places)), zero.expand(len(places), self.opened.A.shape[1])

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        factors, known = {"u": parts["B"], "v": parts["A"]}, {"u": largest["B"], "v": largest["A"]}
        self.mean.add(factors, unit.coefficient, known, where=dict.fromkeys("uv", self.columns[unit.key]))

    def means(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self, adapter: Adapter) -> None:
        weights, held = self.mean.weights, self.mean.visited("u")
        left, right = (self.mean.change(name, held) for name in "uv")
        shares = self.mean.held["u"][held].double() / max(weights.sum, 1)
        scale, rest = (weights.value, 1.0 - weights.value) if self.opened.cohort.absolute else (1.0, 0.0)
        own = (rest, self.opened.B, self.opened.A)  # with weight 0, its rows are where spare terms come from
        set_factors(adapter, *stacked([(scale, left * shares, right), own]))


@torch.no_grad()
def set_factors(adapter: Adapter, left: Tensor, right: Tensor) -> None:
    """Set the balanced factors of the best approximation of a product at an adapter's rank."""
    eps = torch.finfo(adapter.B.dtype).eps
    b, a = balanced_factors(left, right, len(adapter.A), ROW_NORM, eps)
    adapter.B.copy_(b)
    adapter.A.copy_(a)


@dataclass(frozen=True)
class TruncatedProducts(AdapterAggregation):
    """The mean of the products, truncated by SVD to the largest rank; a client of rank r gets the r largest terms.

    The stacked factors are decomposed by QR; no full matrix is formed. With mixed ranks the mean has zeros where a
    small client lacks a term, so terms that small clients lack are pulled to zero. The server holds the factors of all
    clients of a round, in float64.

    Reference:
        Bai et al. (2024), FlexLoRA.
    """

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        """None: new factors have no coordinates in common with the old ones."""
        return ()

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return TruncatedRound(opened)


class StackedRound(AdapterRound):
    """New factors for every round, whose products are summed."""

    def __init__(self, opened: OpenAdapter) -> None:
        super().__init__(opened)
        like = {"product": opened.A.new_zeros(()).expand(opened.layer.out_features, opened.layer.in_features)}
        self.mean = sum_of(like, opened.cohort)

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        self.mean.add({"product": self._product(parts)}, unit.coefficient)

    def largest_summand(self, parts: Tensors, largest: Mapping[str, float]) -> float:
        """A bound on the product, which is multiplied out only if the bound is too large."""
        bound = len(parts["A"]) * abs(self.opened.layer.scale) * largest["B"] * largest["A"]
        return largest_within(bound, lambda: self._product(parts))

    def _product(self, parts: Tensors) -> Tensor:
        return self.opened.layer.scale * (parts["B"].double() @ parts["A"].double())

    def means(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self, adapter: Adapter) -> None:
        ((_, change),) = self.mean.finish()
        apply_mean_change(adapter, [("base", change.T if self.opened.layer.transposed else change)])


@dataclass(frozen=True)
class StackedProducts(AdapterAggregation):
    """The exact mean of the products is added to the base in each round, and adapters restart with a new A.

    This mean is the product of the stacked factors. The base is no longer frozen: it travels to every client in
    every round.

    Reference:
        Wang et al. (2024), FLoRA.
    """

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return ("base",)

    def open(self, opened: OpenAdapter) -> AdapterRound:
        """Draw this round's A; B is zero."""
        cohort = opened.cohort
        rows = drawn_rows(opened.layer, len(opened.A), opened.A, cohort.seed, cohort.round_idx)
        return StackedRound(replace(opened, A=rows))


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
