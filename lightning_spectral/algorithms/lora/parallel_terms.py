"""The aggregation of Fed-PLoRA: parallel adapters of one rank each, of which a client trains some."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.algorithms.lora.aggregation import AdapterAggregation, AdapterRound, OpenAdapter
from lightning_spectral.algorithms.lora.factor_means import TermMeanRound
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator


class ParallelRound(TermMeanRound):
    """Each client is given terms at random, all equally likely."""

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        A, B, cohort = self.opened.A, self.opened.B, self.opened.cohort
        generator = derived_generator(cohort.seed, "terms", cohort.round_idx, *unit.ids, self.opened.layer.name)
        drawn = torch.randperm(len(A), generator=generator)[: self.opened.rank_of(unit)].sort().values
        terms = drawn.to(A.device)
        return terms, {"A": A[terms], "B": B[:, terms]}


@dataclass(frozen=True)
class ParallelTerms(AdapterAggregation):
    """A client of rank r trains r terms at random, and the others are folded into its frozen weight.

    A term is averaged over the clients that trained it, and is never factorised anew: it is the same throughout a run.

    Reference:
        Zhang, Hu & Xu (2026), Fed-PLoRA.

    Note:
        Written from the description in the paper's abstract. Here all terms are equally likely, and are drawn for each
        layer, client and round.
    """

    @property
    def folds(self) -> bool:
        return True

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return ParallelRound(opened, ("A", "B"))
