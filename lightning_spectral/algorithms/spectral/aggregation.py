"""How the clients' factors of one matrix are combined: the contract, the mean of terms, and FedHM's of matrices."""

# Annotations are evaluated eagerly, as in `base.py`.

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spectral.algorithms.fed_avg import sum_of
from lightning_spectral.algorithms.spectral.start import with_absent_rows
from lightning_spectral.algorithms.term_draws import TermDraws
from lightning_spectral.functional.spectra import weight_change
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.sums import MeanChange
from lightning_spectral.sums.exact_mean import NEAR, largest_magnitudes, largest_within


class SentTerms(NamedTuple):
    """The terms of one factorised matrix that a client is sent.

    Attributes:
        drawn, multipliers: Indices and multipliers, shape ``(n,)``, on the CPU.
        terms, omega: The same on the device of the vectors.
        u: Left vectors, shape ``(held rows, n)``.
        v: Right vectors, shape ``(n, c_in k)``.
    """

    drawn: Tensor
    multipliers: Tensor
    terms: Tensor
    omega: Tensor
    u: Tensor
    v: Tensor


class TrainedTerms(NamedTuple):
    """What a client sends back of the terms of one factorised matrix.

    Attributes:
        sent: The terms as it was sent them.
        u: Their left vectors after training.
        v: Their right vectors after training.
        magnitudes: The largest magnitude of each.
    """

    sent: SentTerms
    u: Tensor
    v: Tensor
    magnitudes: tuple[float, float]


@dataclass(eq=False)
class LayerMean(ABC):
    """One factorised matrix in one open round: the sum over clients, and the change that follows from it.

    Args:
        u: Left vectors before training, shape ``(c_out, N)``.
        v: Right vectors before training, shape ``(N, c_in k)``.
        held_rows: Number of leading rows of ``u`` that clients hold; ``None`` for all. The others never change.

    Attributes:
        running: The sum over clients, which several processes add up; a subclass sets it.
        truncates: Whether there may be anything in the `truncation`: by default if a subclass defines it.
    """

    u: Tensor
    v: Tensor
    held_rows: int | None
    running: MeanChange = field(init=False)
    truncates: bool = field(init=False)

    def __post_init__(self) -> None:
        self.truncates = type(self).truncation is not LayerMean.truncation

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
        """The mean change by training, float64, with rows that no client holds; exactly zero where nothing changed."""

    def truncation(self) -> Tensor:
        """What the matrix loses however clients train, with rows that no client holds; by default nothing.

        It is taken from the weight itself: in a pseudo-gradient, a server optimizer with momentum would repeat it.
        """
        return self.u.new_zeros((), dtype=torch.float64).expand(len(self.u), self.v.shape[1])


class TermAggregation(ABC):
    """How the sub-models of many clients are combined into one weight."""

    @abstractmethod
    def open(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> LayerMean:
        """Open a round of one factorised matrix; arguments as for `LayerMean`."""


class MeanOfTerms(LayerMean):
    """The mean of each term's vectors over the clients that held it."""

    def __init__(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> None:
        super().__init__(u, v, held_rows)
        before = {"u": u[:held_rows], "v": v}
        self.running = MeanChange(before, cohort.total, cohort.absolute, by_index={"u": 1, "v": 0})

    @property
    def visited(self) -> Tensor:
        return self.running.held["u"] > 0

    def add(self, client: TrainedTerms, weight: float) -> None:
        largest = dict(zip("uv", client.magnitudes, strict=True))
        self.running.add({"u": client.u, "v": client.v}, weight, largest, where=dict.fromkeys("uv", client.sent.terms))

    def weight_change(self) -> Tensor:
        """Rows of ``u`` that no client holds are unchanged, but are multiplied by the new ``v``."""
        visited = self.running.visited("u")
        u_change, v_change = (self.running.change(name, visited) for name in "uv")
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
        return MeanOfTerms(u, v, cohort, held_rows)


class MeanOfMatrices(LayerMean):
    r"""The mean of :math:`U_c\,\mathrm{diag}(\omega_c)\,V_c - W` over all clients c.

    It is summed in two parts: how far a client's training moved its own matrix, and how far that matrix was from the
    weight when it was sent, which is a multiple of each term. So a client that holds all terms and did not train adds
    exact zeros, however the factors were rounded.
    """

    counts: ClassVar[Sequence[str]] = ("holders", "multiples")

    def __init__(self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None = None) -> None:
        super().__init__(u, v, held_rows)
        of_terms, zero = torch.zeros(len(v), device="cpu"), u.new_zeros(())  # what is known of terms stays on the CPU
        like = dict.fromkeys(self.counts, of_terms) | {"matrix": zero.expand(len(u[:held_rows]), v.shape[1])}
        self.running = sum_of(like, cohort, self.counts)
        self._exact_type = torch.promote_types(u.dtype, torch.float32)  # sums of few small products lose nothing in it

    @property
    def visited(self) -> Tensor:
        return self.running.change("holders") > 0

    @cached_property
    def _before(self) -> tuple[float, ...]:
        """The largest magnitude of each factor before training."""
        return tuple(largest_magnitudes({"u": self.u, "v": self.v}).values())

    def add(self, client: TrainedTerms, weight: float) -> None:
        (drawn, multipliers, *_), matrix = client.sent, self._matrix(client)
        holders = torch.zeros(len(self.v), dtype=torch.float64, device="cpu").index_fill(0, drawn, 1.0)
        of_terms = {"holders": holders}
        if "multiples" in self.counts:
            of_terms["multiples"] = holders.index_copy(0, drawn, multipliers.double()) - 1.0
        largest = largest_magnitudes(of_terms) | {"matrix": largest_within(self._bound(client), lambda: matrix, NEAR)}
        self.running.add_change({**of_terms, "matrix": matrix}, weight, largest)  # of zeros

    def _matrix(self, client: TrainedTerms) -> Tensor:
        """How far a client's training moved its own matrix."""
        exact = self._exact_type
        u, v = client.sent.u.to(exact), client.sent.v.to(exact)
        u_change, v_change = client.u.to(exact) - u, client.v.to(exact) - v
        if bool((client.sent.multipliers != 1).any()):
            scale = client.sent.omega.to(exact)
            u, u_change = u * scale, u_change * scale
        return weight_change(u, v, u_change, v_change)

    def _bound(self, client: TrainedTerms) -> float:
        """A bound on the magnitudes of `_matrix`."""
        omega, (u, v), (u_after, v_after) = client.sent.multipliers, self._before, client.magnitudes
        return len(omega) * float(omega.double().abs().max()) * ((u_after + u) * v_after + u * (v_after + v))

    def largest_summand(self, client: TrainedTerms) -> float:
        """A bound on the matrix, which is multiplied out only if the bound is too large."""
        return largest_within(self._bound(client), lambda: self._matrix(client))

    def weight_change(self) -> Tensor:
        return with_absent_rows(self.running.change("matrix"), len(self.u))

    def truncation(self) -> Tensor:
        u = self.u[: self.held_rows].double()
        return with_absent_rows(-(u * self.running.change("multiples").to(u)) @ self.v.double(), len(self.u))


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
        return MeanOfMatrices(u, v, cohort, held_rows)


class MeanWithinReach(MeanOfMatrices):
    r"""What remains of each term, plus the mean change of the clients' matrices as far as it remains.

    With :math:`w_c` the weights of clients, which sum to 1, and :math:`\pi` and :math:`\omega` the inclusion
    probabilities and multipliers of a round,

    .. math:: W' = \sum_i \rho_i u_i v_i + \sum_{ij} \max(\sigma_i, \sigma_j)\, M_{ij} , \qquad
        \rho_i = \sum_c w_c \pi_{ci} \omega_{ci}

    where :math:`M_{ij}` is the part of the mean change from the right vector of term j to the left one of i, and
    :math:`\sigma_i` is 1 for what clients of every keep ratio could hold, else :math:`\rho_i`; with one keep ratio,
    :math:`\rho_i` is 1 or 0, and M stays whole. So what only larger clients could hold shrinks: otherwise it would pull
    the weight to their examples; and server optimizers, whose momentum it would fill, are not given it.

    Args:
        u: Left vectors before training, of all terms or of the first ones, up to the last that some client could hold.
        v: Right vectors of these terms.
        cohort: The clients that take part.
        held_rows: As for `LayerMean`.
        draws: How clients draw terms, which determines :math:`\rho` and :math:`\sigma`.
        matrix: The weight before training, shape ``(c_out, c_in k)``.
    """

    counts = ("holders",)

    def __init__(
        self, u: Tensor, v: Tensor, cohort: Cohort, held_rows: int | None, draws: TermDraws, matrix: Tensor
    ) -> None:
        super().__init__(u, v, cohort, held_rows)
        self._reach, self._before_training = draws.reach, matrix
        common = torch.stack([plan.inclusion_probs > 0 for plan in draws.groups.values()]).all(dim=0)
        self._shares = self._reach.masked_fill(common, 1.0)
        self.truncates = bool((self._reach != 1.0).any())
        self._shrinks = bool(((self._shares != 0.0) & (self._shares != 1.0)).any())

    @property
    def visited(self) -> Tensor:
        return F.pad(super().visited, (0, len(self._reach) - len(self.v)))

    def weight_change(self) -> Tensor:
        return self._learned(lambda share: (share >= 1.0).to(share))

    @cached_property
    def _bases(self) -> Sequence[Tensor]:
        return [torch.linalg.qr(each.to(self._exact_type)).Q for each in (self.u[: self.held_rows], self.v.mT)]

    def _learned(self, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean change; where terms shrink, times a part of the larger share of a left and of a right vector."""
        if not self._shrinks:
            return super().weight_change()
        change, (u, v) = self.running.change("matrix").to(self._exact_type), self._bases
        of_u, of_v = (self._shares[: basis.shape[1]].to(u) for basis in (u, v))
        left = u.mT @ change
        rows = part(of_u)[:, None] * left - (left @ v * part(torch.minimum(of_u[:, None], of_v))) @ v.mT
        return with_absent_rows((u @ rows + (change @ v * part(of_v)) @ v.mT).double(), len(self.u))

    def truncation(self) -> Tensor:
        kept, exact = torch.nonzero(self._reach).flatten().to(self.v.device), self._exact_type
        u, v = self.u[: self.held_rows, kept].to(exact), self.v[kept].to(exact)
        lost = torch.addmm(self._before_training[: self.held_rows].to(exact), u * self._reach.to(u)[kept], v, alpha=-1)
        learned = self._learned(lambda share: (share >= 1.0).to(share) - share) if self._shrinks else 0.0
        return with_absent_rows(lost, len(self.u)) + learned
