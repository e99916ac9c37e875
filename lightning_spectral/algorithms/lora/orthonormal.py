"""The aggregation of FedSVD: B is trained on a basis that the server renews."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterAggregation, AdapterRound, OpenAdapter
from lightning_spectral.algorithms.lora.factor_means import TermMeanRound
from lightning_spectral.functional.spectra import compact_svd


class OrthonormalRound(TermMeanRound):
    """B is averaged by term, and the product factorised anew when the round closes."""

    def __init__(self, opened: OpenAdapter) -> None:
        super().__init__(opened, ["B"])

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set A to the right singular vectors of the new product and B to the rest, unless B has not changed."""
        change = self.changes()["B"]
        if bool(change.any()):
            U, s, Vh = compact_svd(self.opened.B.double() + change, self.opened.A)
            adapter.B.copy_(U * s)
            adapter.A.copy_(Vh)


@dataclass(frozen=True)
class OrthonormalA(AdapterAggregation):
    """Only B is trained, as with `FrozenA`, but the server renews A: after each round it factorises the product anew.

    With :math:`B A = U S V^T`, the new A is :math:`V^T`, whose rows are orthonormal, and the new B is :math:`U S`. So
    a round averages products exactly, and A follows what was learned. A travels to the clients in every round, and B
    back. In the first round, A is as it was drawn.

    With mixed ranks a client of rank r gets the r largest terms, and a term is averaged over the clients that hold it.

    Reference:
        Lee et al. (2025), FedSVD, for equal ranks.
    """

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        """None: new factors have no coordinates in common with the old ones."""
        return ()

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return OrthonormalRound(opened)

    def trained(self, round_idx: int) -> tuple[str, ...]:
        return ("B",)
