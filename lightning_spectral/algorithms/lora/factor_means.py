"""Aggregations that average the factors themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterAggregation, AdapterRound, OpenAdapter
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.sums import MeanChange, RunningMean

Tensors = Mapping[str, Tensor]


class PaddedRound(AdapterRound):
    """Factors of smaller ranks are padded with zeros for the terms that they lack."""

    def __init__(self, opened: OpenAdapter) -> None:
        super().__init__(opened)
        before = {"A": opened.A, "B": opened.B}
        self.mean = MeanChange(before, opened.cohort.total, opened.cohort.absolute)

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        missing = len(self.opened.A) - len(terms)
        padded = {"A": F.pad(parts["A"], (0, 0, 0, missing)), "B": F.pad(parts["B"], (0, missing))}
        self.mean.add(padded, unit.coefficient, largest)

    def means(self) -> Sequence[RunningMean]:
        return [self.mean]

    def close(self, adapter: Adapter) -> None:
        apply_mean_change(adapter, self.mean.finish())


class TermMeanRound(AdapterRound):
    """Each term is averaged over the clients that held it; terms held by no client are unchanged."""

    def __init__(self, opened: OpenAdapter, trained: Sequence[str]) -> None:
        super().__init__(opened)
        self.trained = tuple(trained)
        before, cohort = {"u": opened.B, "v": opened.A}, opened.cohort
        self.mean = MeanChange(before, cohort.total, cohort.absolute, by_index={"u": 1, "v": 0})

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        """Add the change of a client's terms; a factor that was not trained has not changed."""
        sent = {"A": self.opened.A[terms], "B": self.opened.B[:, terms]}
        b, a = ({**sent, **parts}[name] for name in ("B", "A"))
        known = {"u": largest["B"], "v": largest["A"]} if len(parts) == 2 else None
        self.mean.add({"u": b, "v": a}, unit.coefficient, known, where=dict.fromkeys("uv", terms))

    def means(self) -> Sequence[RunningMean]:
        return [self.mean]

    def changes(self) -> dict[str, Tensor]:
        """Mean change of both factors, float64: zero for terms held by no client."""
        return {"A": self.mean.change("v"), "B": self.mean.change("u")}

    def close(self, adapter: Adapter) -> None:
        changes = self.changes()
        apply_mean_change(adapter, [(name, changes[name]) for name in self.trained])


@dataclass(frozen=True)
class PaddedFactors(AdapterAggregation):
    """The mean of the factors, in which those of smaller ranks are padded with zeros.

    With equal ranks this is FedIT, plain federated LoRA. With mixed ranks a term that small clients lack is pulled to
    zero in every round, whether or not any client trains it. The mean of factors is not the factor of the mean.

    Reference:
        Zhang et al. (2024), FedIT; Cho et al. (2024), HetLoRA, without its pruning and its weights by sparsity.
    """

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return PaddedRound(opened)


@dataclass(frozen=True)
class FrozenA(AdapterAggregation):
    """Only B is trained. A stays as it was drawn, so the mean of the products is the product of the means.

    A term is averaged over the clients that hold it.

    Reference:
        Sun et al. (2024), FFA-LoRA, for equal ranks.
    """

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return ("B",)

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return TermMeanRound(opened, ["B"])

    def trained(self, round_idx: int) -> tuple[str, ...]:
        return ("B",)

    def frozen(self) -> tuple[str, ...]:
        return ("A",)


@dataclass(frozen=True)
class AlternatingFactors(AdapterAggregation):
    """Clients train B in rounds 0, 2, ... and A in rounds 1, 3, ..., so each round averages products exactly.

    A term is averaged over the clients that hold it.

    Reference:
        Chen et al. (2024), RoLoRA, for equal ranks.
    """

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return TermMeanRound(opened, self.trained(opened.cohort.round_idx))

    def trained(self, round_idx: int) -> tuple[str, ...]:
        """B first: while it is zero, A has no gradient."""
        return ("B",) if round_idx % 2 == 0 else ("A",)
