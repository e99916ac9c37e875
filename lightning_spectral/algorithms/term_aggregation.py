"""The contract of an aggregation of singular terms: how the clients' factors of one matrix are summed."""

# Annotations are evaluated eagerly, as in `base.py`.

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from lightning_spectral.algorithms.cut_outputs import with_absent_rows
from lightning_spectral.functional.low_rank import weight_change
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.statistics import MeanTermChange, RunningMean


class TrainedTerms(NamedTuple):
    """The terms of one factorised matrix that a client held, as it sent them back.

    Attributes:
        terms: Their indices, shape ``(n,)``.
        u: Left vectors after training, shape ``(held rows, n)``.
        v: Right vectors after training, shape ``(n, c_in k)``.
        magnitudes: The largest magnitude of each.
        multipliers: Returns the multipliers that were sent, shape ``(n,)``; computed only where they are used.
    """

    terms: Tensor
    u: Tensor
    v: Tensor
    magnitudes: tuple[float, float]
    multipliers: Callable[[], Tensor]


class LayerMean(ABC):
    """One factorised matrix in one open round: the sum over clients, and the change that follows from it.

    Args:
        u: Left vectors before training, shape ``(c_out, N)``.
        v: Right vectors before training, shape ``(N, c_in k)``.
        held_rows: Number of leading rows of ``u`` that clients hold; ``None`` for all. The others never change.
    """

    def __init__(self, u: Tensor, v: Tensor, held_rows: int | None) -> None:
        self.u, self.v, self.held_rows = u, v, held_rows

    @property
    @abstractmethod
    def running(self) -> RunningMean:
        """The sum over clients, which several processes add up."""

    @property
    @abstractmethod
    def visited(self) -> Tensor:
        """Which terms were held by some client, shape ``(N,)``, bool."""

    @abstractmethod
    def add(self, client: TrainedTerms, weight: float) -> None:
        """Add one client with its weight."""

    def largest_summand(self, client: TrainedTerms) -> float:
        """Largest magnitude that `add` would compute and sum, or a bound on it; 0 if it sums only vectors."""
        return 0.0

    @abstractmethod
    def weight_change(self) -> Tensor:
        """Change of the matrix, float64, including rows that no client holds; exactly zero where nothing changed."""


class TermAggregation(ABC):
    """How the sub-models of many clients are combined into one weight."""

    @abstractmethod
    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        """Open a round of one factorised matrix.

        Args:
            u: As for `LayerMean`.
            v: As for `LayerMean`.
            cohort: The clients that take part.
            held_rows: As for `LayerMean`.
        """


class MeanOfTerms(LayerMean):
    """The mean of each term's vectors over the clients that held it."""

    def __init__(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> None:
        super().__init__(u, v, held_rows)
        self._mean = MeanTermChange(u[:held_rows], v, cohort.total, cohort.absolute)

    @property
    def running(self) -> MeanTermChange:
        """The sums of the vectors' changes."""
        return self._mean

    @property
    def visited(self) -> Tensor:
        """Terms held by clients of positive weight."""
        return self._mean.weight > 0

    def add(self, client: TrainedTerms, weight: float) -> None:
        """Add the changes of a client's vectors; multipliers are not used."""
        self._mean.add(client.terms, client.u, client.v, weight, client.magnitudes)

    def weight_change(self) -> Tensor:
        """The change that follows from the new vectors.

        Rows of ``u`` that no client holds are unchanged, but are multiplied by the new ``v``.
        """
        visited, u_change, v_change = self._mean.finish()
        u_change = with_absent_rows(u_change, len(self.u))
        return weight_change(self.u[:, visited].double(), self.v[visited].double(), u_change, v_change)


@dataclass(frozen=True)
class TermMeans(TermAggregation):
    """Each term is averaged over the clients that held it; terms held by no client are unchanged.

    Left and right vectors are averaged separately; the weight is the sum of their products.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1, step 3.
    """

    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        """Begin the sums of both vectors of each term."""
        return MeanOfTerms(u, v, cohort, held_rows)
