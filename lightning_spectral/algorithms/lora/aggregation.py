"""The contract of an aggregation of adapters: what clients get of the server's factors, and how these are averaged."""

# Annotations are evaluated eagerly, as in `base.py`.

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_spectral.nn.adapters import AdaptedLayer
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.protocol.rng import derived_generator
from lightning_spectral.sums import RunningMean

Tensors = Mapping[str, Tensor]
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
    """

    layer: AdaptedLayer
    B: Tensor
    A: Tensor
    cohort: Cohort
    ranks: Mapping[float, int]
    is_mixed: bool

    def rank_of(self, unit: WorkUnit) -> int:
        """Number of terms that a unit gets."""
        return self.ranks[self.cohort.capacity_of(unit)]


class AdapterRound(ABC):
    """One adapted layer in one open round.

    By default a client of rank r gets the first r terms. Parts are named ``"A"``, ``"B"`` and, for the multipliers of
    the terms, ``"omega"``.
    """

    def __init__(self, opened: OpenAdapter) -> None:
        self.opened = opened

    def draw(self, unit: WorkUnit) -> tuple[Tensor, dict[str, Tensor]]:
        """Indices of a unit's terms, shape ``(r,)``, and what it is sent."""
        rank = self.opened.rank_of(unit)
        terms = torch.arange(rank, device=self.opened.A.device)
        return terms, {"A": self.opened.A[:rank], "B": self.opened.B[:, :rank]}

    def rest(self, terms: Tensor) -> dict[str, Tensor]:
        """The factors of all terms but some, by their order; nothing if there are no others."""
        A, B = self.opened.A, self.opened.B
        others = torch.ones(len(A), dtype=torch.bool, device=A.device).index_fill_(0, terms, False)
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
    def means(self) -> Sequence[RunningMean]:
        """Its running sums, which several processes add up; raises ``NotImplementedError`` if it has none."""

    @abstractmethod
    def close(self, adapter: Adapter) -> None:
        """Set pseudo-gradients of the server's factors or base, or the new factors themselves."""


class AdapterAggregation(ABC):
    """How the adapters of many clients are combined into one."""

    @property
    def has_multipliers(self) -> bool:
        """Whether terms have multipliers if clients have different ranks; by default not."""
        return False

    @property
    def folds(self) -> bool:
        """Whether a client is also sent the terms that it does not train, as part of its frozen weight; by default not.

        Only where the average of a term does not count those clients.
        """
        return False

    @abstractmethod
    def open(self, opened: OpenAdapter) -> AdapterRound:
        """Open a round of one adapted layer."""

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

    def frozen(self) -> tuple[str, ...]:
        """The factors that never change; by default none."""
        return ()


def drawn_rows(layer: AdaptedLayer, rank: int, like: Tensor, seed: int, *ids: int) -> Tensor:
    r"""Random rows of A, uniform in :math:`\pm 1 / \sqrt{c_{in}}`, as PEFT draws them; shape ``(rank, c_in)``.

    They have dtype and device of ``like``, and depend on the seed, the layer's name and ``ids``.
    """
    generator = derived_generator(seed, "adapter", *ids, layer.name)
    rows: Tensor = torch.rand(rank, layer.in_features, generator=generator, dtype=torch.float64) * 2 - 1
    return (rows / math.sqrt(layer.in_features)).to(like)
