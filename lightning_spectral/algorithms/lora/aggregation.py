"""How the adapters of many clients are combined into one: the contract, and the published rules."""

# Annotations are evaluated eagerly, as in `base.py`.

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_spectral.algorithms.fed_avg import sum_of
from lightning_spectral.algorithms.term_draws import TermDraws, plan_draws
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.functional.spectra import Factors, stacked
from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import Tensors, WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sharding import Collective, ShardingStrategy
from lightning_spectral.sums import MeanChange
from lightning_spectral.sums.exact_mean import largest_within

ROW_NORM = (1 / 3) ** 0.5  # norm of a row of A as it is drawn


class Adapter(nn.Module):
    """What the server stores of one adapted layer between rounds.

    Attributes:
        base: The weight without its adapter, in the weight's own shape; ``None`` for a PEFT adapter, whose weight the
            server's module holds unmerged.
        B: Left factor, shape ``(c_out, R)``.
        A: Right factor, shape ``(R, c_in)``.
    """

    base: nn.Parameter | None

    def __init__(self, base: Tensor | None, B: Tensor, A: Tensor) -> None:
        super().__init__()
        self.register_parameter("base", None if base is None else nn.Parameter(base, requires_grad=False))
        self.B, self.A = (nn.Parameter(part, requires_grad=False) for part in (B, A))


@dataclass(frozen=True, eq=False)
class OpenAdapter:
    """One adapted layer when a round opens.

    Attributes:
        layer: The layer.
        B: The server's left factor, shape ``(c_out, R)``.
        A: The server's right factor, shape ``(R, c_in)``.
        cohort: The clients that take part.
        ranks: Rank of the clients of each keep ratio in the cohort.
        is_mixed: Whether the federation has clients of different ranks.
        trained: The factors that clients train in this round.
    """

    layer: AdaptedLayer
    B: Tensor
    A: Tensor
    cohort: Cohort
    ranks: Mapping[float, int]
    is_mixed: bool
    trained: tuple[str, ...]

    def rank_of(self, unit: WorkUnit) -> int:
        """Number of terms that a unit gets."""
        return self.ranks[self.cohort.capacity_of(unit)]


@dataclass(eq=False)
class AdapterRound(ABC):
    """One adapted layer in one open round.

    By default a client of rank r gets the first r terms. Parts are named ``"A"``, ``"B"`` and, for the multipliers of
    the terms, ``"omega"``.

    Attributes:
        mean: Its running sum or mean, which several processes add up; a subclass sets it.
    """

    opened: OpenAdapter
    mean: MeanChange = field(init=False)

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        """Indices of a unit's terms, shape ``(r,)``, and what it is sent."""
        rank = self.opened.rank_of(unit)
        terms = torch.arange(rank, device=self.opened.A.device)
        return terms, {"A": self.opened.A[:rank], "B": self.opened.B[:, :rank]}

    def rest(self, terms: Tensor) -> dict[str, Tensor]:
        """The factors of all terms but some, by their order; nothing if there are no others."""
        A, B = self.opened.A, self.opened.B
        others = torch.ones(len(A), dtype=torch.bool, device=A.device).index_fill_(0, terms, False).nonzero().squeeze(1)
        return {"A": A[others], "B": B[:, others]} if len(terms) < len(A) else {}

    @abstractmethod
    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        """Add the factors that one unit trained, weighted by its coefficient.

        ``terms`` are the indices that `draw` returned; ``largest`` is the largest magnitude of each factor.
        """

    def largest_summand(self, parts: Tensors, largest: Mapping[str, float]) -> float:
        """Largest magnitude that `add` would compute and sum, or a bound on it; 0 if it sums only factors."""
        return 0.0

    @abstractmethod
    def close(self, adapter: Adapter) -> None:
        """Set pseudo-gradients of the server's factors or base, or the new factors themselves."""


class AdapterAggregation(ABC):
    """How the adapters of many clients are combined into one.

    Attributes:
        has_multipliers: Whether terms have multipliers if clients have different ranks.
        folds: Whether a client is also sent the terms that it does not train, as part of its frozen weight; only where
            the average of a term does not count those clients.
        frozen: The factors that never change.
    """

    has_multipliers: ClassVar[bool] = False
    folds: ClassVar[bool] = False
    frozen: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def round(self) -> type[AdapterRound]:
        """What `open` makes of each adapted layer."""

    def open(self, opened: OpenAdapter) -> AdapterRound:
        """Open a round of one adapted layer."""
        return self.round(opened)

    def open_all(self, opened: Sequence[OpenAdapter]) -> list[AdapterRound]:
        """Open a round of all adapted layers, in their order; by default one after another."""
        return [self.open(one) for one in opened]

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        """The parts of an `Adapter` that the server optimizer steps; by default both factors.

        If there are none, the aggregation sets new factors itself, and only plain averaging makes sense. ``is_mixed``
        says whether the federation has clients of different ranks.
        """
        return ("B", "A")

    def trained(self, round_idx: int) -> tuple[str, ...]:
        """The factors that clients train and send back in a round; by default both."""
        return ("A", "B")


def drawn_rows(layer: AdaptedLayer, rank: int, like: Tensor, seed: int, *ids: int) -> Tensor:
    r"""Random rows of A, uniform in :math:`\pm 1 / \sqrt{c_{in}}`, as PEFT draws them; shape ``(rank, c_in)``.

    They have dtype and device of ``like``, and depend on the seed, the layer's name and ``ids``.
    """
    generator = derived_generator(seed, "adapter", *ids, layer.name)
    rows: Tensor = torch.rand(rank, layer.in_features, generator=generator, dtype=torch.float64) * 2 - 1
    return (rows / math.sqrt(layer.in_features)).to(like)


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

    def close(self, adapter: Adapter) -> None:
        apply_mean_change(adapter, self.mean.finish())


@dataclass(frozen=True)
class PaddedFactors(AdapterAggregation):
    """The mean of the factors, in which those of smaller ranks are padded with zeros.

    With equal ranks this is FedIT, plain federated LoRA. With mixed ranks a term that small clients lack is pulled to
    zero in every round, whether or not any client trains it. The mean of factors is not the factor of the mean.

    Reference:
        Zhang et al. (2024), FedIT; Cho et al. (2024), HetLoRA, without its pruning and its weights by sparsity.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> of_mixed_ranks = LoRA(rank={4: 0.5, 8: 0.5}, aggregation=PaddedFactors())
        >>> of_mixed_ranks.aggregation.steps(is_mixed=True)  # what the server's optimizer steps
        ('B', 'A')
    """

    round = PaddedRound


class TermMeanRound(AdapterRound):
    """Each term is averaged over the clients that held it; terms held by no client are unchanged."""

    def __init__(self, opened: OpenAdapter) -> None:
        super().__init__(opened)
        before, cohort = {"B": opened.B, "A": opened.A}, opened.cohort
        self.mean = MeanChange(before, cohort.total, cohort.absolute, by_index={"B": 1, "A": 0})

    def of_terms(self, terms: Tensor) -> dict[str, Tensor]:
        """The server's factors of some terms."""
        return {"A": self.opened.A[terms], "B": self.opened.B[:, terms]}

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        """Add the change of a client's terms; a factor that was not trained has not changed."""
        known = largest if len(parts) == 2 else None
        self.mean.add({**self.of_terms(terms), **parts}, unit.coefficient, known, where=dict.fromkeys("BA", terms))

    def close(self, adapter: Adapter) -> None:
        apply_mean_change(adapter, [(name, self.mean.change(name)) for name in self.opened.trained])


@dataclass(frozen=True)
class FrozenA(AdapterAggregation):
    """Only B is trained. A stays as it was drawn, so the mean of the products is the product of the means.

    A term is averaged over the clients that hold it.

    Reference:
        Sun et al. (2024), FFA-LoRA, for equal ranks.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> LoRA(rank=4, aggregation=FrozenA()).aggregation.trained(round_idx=1)
        ('B',)
    """

    round = TermMeanRound
    frozen = ("A",)

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return ("B",)

    def trained(self, round_idx: int) -> tuple[str, ...]:
        return ("B",)


@dataclass(frozen=True)
class AlternatingFactors(AdapterAggregation):
    """Clients train B in rounds 0, 2, ... and A in rounds 1, 3, ..., so each round averages products exactly.

    A term is averaged over the clients that hold it.

    Reference:
        Chen et al. (2024), RoLoRA, for equal ranks.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> aggregation = LoRA(rank=4, aggregation=AlternatingFactors()).aggregation
        >>> [aggregation.trained(round_idx) for round_idx in range(3)]
        [('B',), ('A',), ('B',)]
    """

    round = TermMeanRound

    def trained(self, round_idx: int) -> tuple[str, ...]:
        """B first: while it is zero, A has no gradient."""
        return ("B",) if round_idx % 2 == 0 else ("A",)


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
        before = dict(zip("BA", self.factors_before(self.places), strict=True))
        self.mean = MeanChange(before, opened.cohort.total, by_index={"B": 1, "A": 0})

    def factors_before(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """What is subtracted from the clients' factors, by the places of their columns in each client: zeros."""
        zero = self.opened.A.new_zeros(())
        return zero.expand(len(self.opened.B), len(places)), zero.expand(len(places), self.opened.A.shape[1])

    def add(self, unit: WorkUnit, terms: Tensor, parts: Tensors, largest: Mapping[str, float]) -> None:
        self.mean.add(parts, unit.coefficient, largest, where=dict.fromkeys("BA", self.columns[unit.key]))

    def close(self, adapter: Adapter) -> None:
        weights, held = self.mean.weights, self.mean.visited("B")
        left, right = (self.mean.change(name, held) for name in "BA")
        shares = self.mean.held["B"][held].double() / max(weights.sum, 1)
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

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> LoRA(rank={4: 0.5, 8: 0.5}, aggregation=TruncatedProducts()).aggregation.steps(is_mixed=True)
        ()
    """

    round = TruncatedRound

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        """None: new factors have no coordinates in common with the old ones."""
        return ()


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

    def close(self, adapter: Adapter) -> None:
        ((_, change),) = self.mean.finish()
        apply_mean_change(adapter, [("base", change.T if self.opened.layer.transposed else change)])


@dataclass(frozen=True)
class StackedProducts(AdapterAggregation):
    """The exact mean of the products is added to the base in each round, and adapters restart with a new A.

    This mean is the product of the stacked factors. The base is no longer frozen: it is sent to every client in every
    round.

    Reference:
        Wang et al. (2024), FLoRA.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> LoRA(rank={4: 0.5, 8: 0.5}, aggregation=StackedProducts()).aggregation.steps(is_mixed=True)
        ('base',)
    """

    round = StackedRound

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return ("base",)

    def open(self, opened: OpenAdapter) -> AdapterRound:
        """Draw this round's A; B is zero."""
        cohort = opened.cohort
        rows = drawn_rows(opened.layer, len(opened.A), opened.A, cohort.seed, cohort.round_idx)
        return self.round(replace(opened, A=rows))


class RankedRound(TruncatedRound):
    """The clients' i-th terms are averaged over the clients that have so many."""

    def factors_before(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """The server's, so that clients that change nothing add exact zeros."""
        return self.opened.B[:, places], self.opened.A[places]

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set the factors of the new product, unless no client has changed any."""
        changes = [self.mean.change(name) for name in "BA"]
        if any(bool(change.any()) for change in changes):
            left, right = (own + change for own, change in zip(self.factors_before(self.places), changes, strict=True))
            # the weight of each column of the clients' factors, and of each term of the server's
            held, step = self.mean.held["B"].double(), self.mean.weights.value if self.opened.cohort.absolute else 1.0
            of_place = held.new_zeros(len(self.opened.A)).index_add_(0, self.places, held)
            shares = step * held / of_place[self.places].clamp(min=1)
            own = (1.0, self.opened.B * torch.where(of_place > 0, 1.0 - step, 1.0), self.opened.A)
            set_factors(adapter, *stacked([(1.0, left * shares, right), own]))


@dataclass(frozen=True)
class RankedProducts(TruncatedProducts):
    """The mean of the products as with `TruncatedProducts`, but rank by rank, over the clients that have the rank.

    The products of the clients' first terms are averaged over all clients, those of their i-th terms over the clients
    of rank i or more. So small clients do not pull the terms that they lack to zero. Terms beyond the ranks of all
    clients of a round are added unchanged, but the sum is truncated to the largest rank, so the smallest of them may be
    lost.

    Reference:
        Wu et al. (2026), raFLoRA.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> LoRA(rank={4: 0.5, 8: 0.5}, aggregation=RankedProducts()).aggregation
        RankedProducts()

    Note:
        Written from the description in the paper's abstract. Clients are weighted by their coefficients, as everywhere
        here.
    """

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return RankedRound(opened) if opened.is_mixed else TruncatedRound(opened)


class OrthonormalRound(TermMeanRound):
    """B is averaged by term, and the product factorised anew when the round closes."""

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set A to the right singular vectors of the new product and B to the rest, unless B has not changed."""
        change = self.mean.change("B")
        if bool(change.any()):
            U, s, Vh = compact_svd(self.opened.B.double() + change, self.opened.A)
            adapter.B.copy_(U * s)
            adapter.A.copy_(Vh)


@dataclass(frozen=True)
class OrthonormalA(AdapterAggregation):
    """Only B is trained, as with `FrozenA`, but the server renews A: after each round it factorises the product anew.

    With :math:`B A = U S V^T`, the new A is :math:`V^T`, whose rows are orthonormal, and the new B is :math:`U S`. So
    a round averages products exactly, and A follows what was learned. A is sent to the clients in every round, and B
    back. In the first round, A is as drawn.

    With mixed ranks a client of rank r gets the r largest terms, and a term is averaged over the clients that hold it.

    Reference:
        Lee et al. (2025), FedSVD, for equal ranks.
    """

    round = OrthonormalRound

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        """None: new factors have no coordinates in common with the old ones."""
        return ()

    def trained(self, round_idx: int) -> tuple[str, ...]:
        return ("B",)


class ParallelRound(TermMeanRound):
    """Each client is given terms at random, all equally likely."""

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        A, cohort = self.opened.A, self.opened.cohort
        generator = derived_generator(cohort.seed, "terms", cohort.round_idx, *unit.ids, self.opened.layer.name)
        drawn = torch.randperm(len(A), generator=generator)[: self.opened.rank_of(unit)].sort().values
        terms = drawn.to(A.device)
        return terms, self.of_terms(terms)


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

    round = ParallelRound
    folds = True


class SampledRound(TermMeanRound):
    """Terms are drawn for each client, averaged by term, and factorised anew when the round closes."""

    def __init__(self, opened: OpenAdapter, draws: TermDraws, multiplied: bool) -> None:
        super().__init__(opened)
        self._draws, self._multiplied = draws, multiplied

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        drawn = self._draws.draw(self.opened.cohort, unit)
        terms = drawn.to(self.opened.B.device)
        if not self._multiplied:
            return terms, self.of_terms(terms)
        omega = self._draws.multipliers(self.opened.cohort.capacity_of(unit), drawn)
        return terms, {**self.of_terms(terms), "omega": omega.to(self.opened.B)}

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set the singular terms of the product of the mean factors, unless neither factor has changed."""
        B, A = self.mean.change("B"), self.mean.change("A")
        if bool(B.any()) or bool(A.any()):
            set_factors(adapter, self.opened.B.double() + B, self.opened.A.double() + A)


@dataclass(frozen=True)
class SampledTerms(AdapterAggregation):
    """A client of rank r gets r sampled singular terms of the server's product, as in `SpectralSharding`.

    After each round, the server factorises its product B A anew, by QR of the factors. A strategy turns singular values
    into inclusion probabilities and multipliers, a design draws terms, and each term is averaged over the clients that
    held it; terms held by no client are unchanged. In the first round the product is zero and all terms are equally
    likely; later, a zero term is as likely as the smallest non-zero one.

    With equal ranks all clients hold all terms: this is plain federated LoRA, and nothing is factorised.

    Args:
        strategy: Turns singular values into inclusion probabilities and multipliers. A term's multiplier also scales
            its gradients.
        design: Draws terms with those probabilities; ``None`` for the strategy's own.

    Reference:
        Korzhenkov & Louizos (2024), section 3.1, here for the update B A in place of the weight.

    Example:
        >>> from lightning_spectral.algorithms import LoRA
        >>> from lightning_spectral.sharding import Unbiased
        >>> LoRA(rank={4: 0.5, 8: 0.5}, aggregation=SampledTerms(Unbiased())).aggregation
        SampledTerms(strategy=Unbiased(), design=None)
    """

    round = TermMeanRound
    has_multipliers = True

    strategy: ShardingStrategy = field(default_factory=Collective)
    design: Design | None = None

    def __post_init__(self) -> None:
        check_is("strategy", self.strategy, ShardingStrategy)
        check_is("design", self.design, Design | None)

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return () if is_mixed else ("B", "A")

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return self.open_all([opened])[0]

    def open_all(self, opened: Sequence[OpenAdapter]) -> list[AdapterRound]:
        if not opened or not opened[0].is_mixed:
            return [self.round(one) for one in opened]
        spectra, ordered = {}, []
        for one in opened:  # a user's own adapter may have its terms in any order
            sizes, order = term_sizes(one.B, one.A).sort(descending=True, stable=True)
            spectra[one.layer.name] = sizes
            ordered.append(replace(one, B=one.B[:, order], A=one.A[order]))
        draws = plan_draws(spectra, self.strategy, self.design, opened[0].cohort)
        return [SampledRound(one, draws[one.layer.name], self.has_multipliers) for one in ordered]


@dataclass(frozen=True)
class FoldedTerms(SampledTerms):
    """`SampledTerms`, where a client also gets the terms that it does not train, folded into its frozen weight.

    So every client starts from the server's whole network, whatever its rank, and there are no multipliers: those of
    the strategy are not used. A client trains and sends back as much as with `SampledTerms`, but is sent as much as a
    client of the largest rank. The base itself is still sent once, since the other terms are sent as factors.

    Args:
        strategy: Turns singular values into inclusion probabilities.
        design: Draws terms with those probabilities; ``None`` for the strategy's own.

    Reference:
        Zhang, Hu & Xu (2026), Fed-PLoRA, for folding; their own terms are those of `ParallelTerms`.
    """

    has_multipliers = False  # a folded weight is the server's, whose terms no multiplier may change
    folds = True


def term_sizes(B: Tensor, A: Tensor) -> Tensor:
    """Norms of the terms of a product, shape ``(R,)``, float64: its singular values, if the factors are balanced.

    Zero terms get the size of the smallest non-zero one; if all are zero, they get 1.

    Example:
        >>> term_sizes(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0], [1.0]]))
        tensor([6., 6.], dtype=torch.float64)
    """
    sizes = B.double().norm(dim=0) * A.double().norm(dim=1)
    smallest = torch.where(sizes > 0, sizes, torch.inf).min()
    return torch.where(sizes > 0, sizes, torch.where(smallest < torch.inf, smallest, 1.0))


def balanced_factors(left: Tensor, right: Tensor, rank: int, spare: float, eps: float) -> tuple[Tensor, Tensor]:
    """The best approximation of a product by ``rank`` terms, each singular value split evenly between its vectors.

    A term whose singular value is at most ``eps`` times the largest counts as zero: it gets a left vector of zeros and
    a right vector of norm ``spare``. It adds nothing but can still be trained, which it could not with two zero
    vectors. The factors have shapes ``(c_out, rank)`` and ``(rank, c_in)``, float64.
    """
    U, s, Vh = compact_svd(left, right)
    U, s, Vh = U[:, :rank], s[:rank], Vh[:rank]
    is_live, root = s > eps * s[0], s.sqrt()
    return U * (root * is_live), Vh * torch.where(is_live, root, spare)[:, None]


def compact_svd(left: Tensor, right: Tensor) -> Factors:
    """Singular value decomposition of a product of two thin factors, with ``min(c_out, c_in, K)`` terms, in float64.

    Both factors, ``(c_out, K)`` and ``(K, c_in)``, are reduced by QR first, so that the time grows with
    ``(c_out + c_in) K^2`` rather than with ``c_out c_in``.
    """
    q_left, r_left = torch.linalg.qr(left.double())
    q_right, r_right = torch.linalg.qr(right.double().T)
    U, s, Vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    return Factors(q_left @ U, s, Vh @ q_right.T)
