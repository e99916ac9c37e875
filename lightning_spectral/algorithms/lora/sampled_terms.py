"""The aggregation of this package: each client gets sampled terms of the server's product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_spectral.algorithms.lora.aggregation import Adapter, AdapterAggregation, AdapterRound, OpenAdapter
from lightning_spectral.algorithms.lora.factor_means import TermMeanRound
from lightning_spectral.algorithms.lora.product_means import set_factors
from lightning_spectral.algorithms.term_draws import TermDraws, plan_draws
from lightning_spectral.designs import Design
from lightning_spectral.errors import check_is
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.sharding import Collective, ShardingStrategy


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
