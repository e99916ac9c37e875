"""Aggregations that average the factors themselves, whole or term by term."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterAggregation, AdapterRound, OpenAdapter
from lightning_spectral.algorithms.lora.products import set_factors
from lightning_spectral.algorithms.term_draws import TermDraws, plan_draws
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.functional.spectra import compact_svd
from lightning_spectral.protocol.exchange import apply_mean_change
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sharding import Collective, ShardingStrategy
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


class SampledRound(TermMeanRound):
    """Terms are drawn for each client, averaged by term, and factorised anew when the round closes."""

    def __init__(self, opened: OpenAdapter, draws: TermDraws, multiplied: bool) -> None:
        super().__init__(opened, ("A", "B"))
        self._draws, self._multiplied = draws, multiplied

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        drawn, omega = self._draws.draw(self.opened.cohort, unit)
        A, B = self.opened.A, self.opened.B
        terms = drawn.to(B.device)
        multipliers = {"omega": omega.to(B)} if self._multiplied else {}
        return terms, {"A": A[terms], "B": B[:, terms], **multipliers}

    @torch.no_grad()
    def close(self, adapter: Adapter) -> None:
        """Set the singular terms of the product of the mean factors, unless neither factor has changed."""
        changes = self.changes()
        if any(bool(change.any()) for change in changes.values()):
            set_factors(adapter, self.opened.B.double() + changes["B"], self.opened.A.double() + changes["A"])


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
    """

    strategy: ShardingStrategy = field(default_factory=Collective)
    design: Design | None = None

    def __post_init__(self) -> None:
        check_is("strategy", self.strategy, ShardingStrategy)
        if self.design is not None:
            check_is("design", self.design, Design)

    @property
    def has_multipliers(self) -> bool:
        return True

    def steps(self, is_mixed: bool) -> tuple[str, ...]:
        return () if is_mixed else ("B", "A")

    def open(self, opened: OpenAdapter) -> AdapterRound:
        return self.open_all([opened])[0]

    def open_all(self, opened: Sequence[OpenAdapter]) -> list[AdapterRound]:
        if not opened or not opened[0].is_mixed:
            return [TermMeanRound(one, ("A", "B")) for one in opened]
        ordered = [_by_size(one) for one in opened]
        spectra = {one.layer.name: norms for norms, one in ordered}
        draws = plan_draws(spectra, self.strategy, self.design, opened[0].cohort)
        return [SampledRound(one, draws[one.layer.name], self.has_multipliers) for _, one in ordered]


@dataclass(frozen=True)
class FoldedTerms(SampledTerms):
    """`SampledTerms`, where a client also gets the terms that it does not train, folded into its frozen weight.

    So every client starts from the server's whole network, whatever its rank, and there are no multipliers: those of
    the strategy are not used. A client trains and sends back as much as with `SampledTerms`, but is sent as much as a
    client of the largest rank. The base itself still travels once, since the other terms travel as factors.

    Args:
        strategy: Turns singular values into inclusion probabilities.
        design: Draws terms with those probabilities; ``None`` for the strategy's own.

    Reference:
        Zhang, Hu & Xu (2026), Fed-PLoRA, for folding; their own terms are those of `ParallelTerms`.
    """

    @property
    def has_multipliers(self) -> bool:
        """None: a folded weight is the server's, whose terms no multiplier may change."""
        return False

    @property
    def folds(self) -> bool:
        return True


def _by_size(opened: OpenAdapter) -> tuple[Tensor, OpenAdapter]:
    """Sizes of the terms, descending, and both factors in this order: a user's own adapter may have any."""
    norms, order = term_sizes(opened.B, opened.A).sort(descending=True, stable=True)
    return norms, replace(opened, B=opened.B[:, order], A=opened.A[order])


def term_sizes(B: Tensor, A: Tensor) -> Tensor:
    """Norms of the terms of a product, shape ``(R,)``, float64: its singular values, if the factors are balanced.

    Zero terms get the size of the smallest non-zero one; if all are zero, they get 1.

    Example:
        >>> term_sizes(torch.tensor([[2.0, 0.0]]), torch.tensor([[3.0], [1.0]]))
        tensor([6., 6.], dtype=torch.float64)
    """
    sizes = B.double().norm(dim=0) * A.double().norm(dim=1)
    live = sizes[sizes > 0]
    return torch.where(sizes > 0, sizes, live.min() if len(live) else 1.0)
