"""The aggregation of FedHM: each client's terms are multiplied out, and the matrices are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_spectral.algorithms.cut_outputs import with_absent_rows
from lightning_spectral.algorithms.dense_mean import sum_of
from lightning_spectral.algorithms.term_aggregation import LayerMean, TermAggregation, TrainedTerms
from lightning_spectral.functional.low_rank import weight_change
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.magnitudes import largest_magnitudes, largest_within
from lightning_spectral.protocol.statistics import MeanChange


class MeanOfMatrices(LayerMean):
    r"""The mean of :math:`U_c\,\mathrm{diag}(\omega_c)\,V_c - W` over all clients c.

    It is summed in two parts: how far a client's training moved its own matrix, and how far that matrix was from the
    weight when it was sent, which is a multiple of each term. So a client that holds all terms and did not train adds
    exact zeros, however the factors were rounded.
    """

    def __init__(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> None:
        super().__init__(u, v, held_rows)
        of_terms, zero = v[:, 0], u.new_zeros(())
        matrix = zero.expand(len(u[:held_rows]), v.shape[1])
        self._before = tuple(largest_magnitudes({"u": u, "v": v}).values())
        self._mean = sum_of({"holders": of_terms, "multiples": of_terms, "matrix": matrix}, cohort)

    @property
    def running(self) -> MeanChange:
        """The sums of each term's holders, of the terms' multiples, and of the changes from training."""
        return self._mean

    @property
    def visited(self) -> Tensor:
        """Terms held by clients of positive weight."""
        _, holders = next(self._mean.finish())
        return holders > 0

    def add(self, client: TrainedTerms, weight: float) -> None:
        """Multiply out what a client sent back."""
        omega = client.multipliers().double()
        matrix = self._matrix(client, omega)
        holders, multiples = omega.new_zeros(len(self.v)), omega.new_full((len(self.v),), -1.0)
        holders[client.terms], multiples[client.terms] = 1.0, omega - 1.0
        self._mean.add({"holders": holders, "multiples": multiples, "matrix": matrix}, weight)

    def _matrix(self, client: TrainedTerms, omega: Tensor) -> Tensor:
        """How far a client's training moved its own matrix."""
        u, v = self.u[: self.held_rows, client.terms].double(), self.v[client.terms].double()
        return weight_change(u * omega, v, (client.u.double() - u) * omega, client.v.double() - v)

    def largest_summand(self, client: TrainedTerms) -> float:
        """A bound on the matrix, which is multiplied out only if the bound is too large."""
        omega, (u, v), (u_after, v_after) = client.multipliers().double(), self._before, client.magnitudes
        bound = len(client.terms) * float(omega.abs().max()) * ((u_after + u) * v_after + u * (v_after + v))
        return largest_within(bound, lambda: self._matrix(client, omega))

    def weight_change(self) -> Tensor:
        """Both parts together; rows that no client holds are unchanged."""
        mean = dict(self._mean.finish())
        truncation = (self.u[: self.held_rows].double() * mean["multiples"]) @ self.v.double()
        return with_absent_rows(mean["matrix"] + truncation, len(self.u))


@dataclass(frozen=True)
class MatrixMeans(TermAggregation):
    r"""The weight becomes the mean of the clients' matrices, :math:`U_c\,\mathrm{diag}(\omega_c)\,V_c`.

    A client's matrix is zero in the terms that it lacks. So a term that half of the clients hold is halved in every
    round, and a term that no client holds is lost: with `TopN` and no clients of keep ratio 1, the smallest terms are
    lost in the first round. With keep ratio 1 for all clients, this is the mean of whole matrices, and nothing is lost.

    Each process keeps one float64 sum of the size of each sharded weight, and multiplies out the terms of each client.

    Reference:
        Yao et al. (2021), FedHM, with `TopN`.
    """

    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        """Begin the sum of matrices."""
        return MeanOfMatrices(u, v, cohort, held_rows)
