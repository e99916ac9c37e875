"""The sharded matrices of a module, and the spectral start, which moves their energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor, nn

from lightning_spectral.algorithms.term_draws import naming_layer
from lightning_spectral.arguments import check_fields, flag
from lightning_spectral.functional.spectra import (
    KEEP_RATIO,
    TAIL,
    concentrated_values,
    factorize,
    is_concentrated,
    looks_random,
)
from lightning_spectral.nn.layers.terms import assemble, by_parameter
from lightning_spectral.nn.plan.module_plan import LayerChoices, ModulePlan
from lightning_spectral.nn.plan.planner import plan_of
from lightning_spectral.protocol.cohort import Workers

__all__ = ["SpectralStart", "StartReport", "spectral_start"]


def matrices_of(module: nn.Module, plan: ModulePlan) -> dict[str, Tensor]:
    """The sharded matrices of a module by the names of the plan's blocks and in their order, detached."""
    return {name: block.matrix(module.get_parameter(block.parameter).detach()) for name, block in plan.blocks.items()}


def of_each_matrix(
    module: nn.Module, plan: ModulePlan, compute: Callable[[str, Tensor], tuple[Tensor, ...]], workers: Workers
) -> dict[str, tuple[Tensor, ...]]:
    """What follows from each sharded matrix, computed in one of the processes; errors name the layer."""

    def named(piece: tuple[str, Tensor]) -> tuple[Tensor, ...]:
        with naming_layer(piece[0]):
            return compute(*piece)

    def cost(piece: tuple[str, Tensor]) -> float:  # multiplications of a decomposition, up to a factor
        return float(piece[1].numel() * min(piece[1].shape))

    pieces = list(matrices_of(module, plan).items())
    return dict(zip(plan.blocks, workers.share_out(pieces, named, cost), strict=True))


def assembled(
    module: nn.Module, plan: ModulePlan, matrix_of: Callable[[str], Tensor]
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield every sharded weight, with a tensor of its shape made of ``matrix_of`` each of its blocks' names."""
    for name, blocks in by_parameter(list(plan.blocks.values())):
        weight = module.get_parameter(name)
        yield weight, assemble(blocks, [matrix_of(block.name).to(weight.dtype) for block in blocks], weight)


def with_absent_rows(change: Tensor, num_rows: int) -> Tensor:
    """A change of leading rows, followed by zeros."""
    if len(change) == num_rows:
        return change
    whole = change.new_zeros(num_rows, *change.shape[1:])
    whole[: len(change)] = change
    return whole


@dataclass(frozen=True)
class SpectralStart:
    r"""Moves the energy of random weights into their first terms, once, before the first round.

    In each sharded matrix, the first n singular values are kept, the others are multiplied by ``tail``, and the matrix
    is rescaled to its old Frobenius norm. Singular vectors, dense layers and biases are unchanged.

    Args:
        tail: Factor f on the terms beyond the first n, in [0, 1]. With 0 they are lost for good: a term of size zero
            has no gradient.
        keep_ratio: Share of all terms that makes up the first n, rounded as for clients; ``None`` for the clients'
            smallest keep ratio, so that every client can hold the energy.
        trained: Whether to change even weights that look trained.

    Note:
        A weight looks trained if its largest singular value exceeds that of a random matrix of its size and norm. A
        weight whose next term is at most ``tail`` times the n-th has nothing to move. So fitting again with the same
        ratio does not repeat a start, even in small matrices, where the start does not show in the largest value.

    Example:
        >>> SpectralStart(tail=0.02)
        SpectralStart(tail=0.02, keep_ratio=None, trained=False)
    """

    tail: float = 0.1
    keep_ratio: float | None = None
    trained: bool = False

    def __post_init__(self) -> None:
        check_fields(self, tail=TAIL, keep_ratio=replace(KEEP_RATIO, optional=True), trained=flag)


@dataclass(frozen=True)
class StartReport:
    """The outcome of a spectral start, which prints as one sentence.

    Attributes:
        keep_ratio: Share of the terms into which energy was moved.
        changed: Names of the matrices that were changed.
        kept: Names of the others, which look trained or have nothing to move.
        held: Share of the changed matrices' energy, their squared norm, that was in these terms before: their mean.
    """

    keep_ratio: float
    changed: Sequence[str]
    kept: Sequence[str]
    held: float

    def __str__(self) -> str:
        total = len(self.changed) + len(self.kept)
        where = f"{len(self.changed)} of {total} sharded matrices is now in {self.keep_ratio:.0%} of the terms"
        before = f", which held {self.held:.0%} of it" if self.changed else ""
        why = "because they look trained or have nothing to move"
        left = f"; left as they are, {why}: {', '.join(self.kept)}" if self.kept else ""
        return f"Spectral start: the energy of {where}{before}{left}."


def spectral_start(
    module: nn.Module,
    keep_ratio: float,
    *,
    tail: float = 0.1,
    trained: bool = False,
    layers: LayerChoices | ModulePlan = LayerChoices(),
    workers: Workers | None = None,
) -> StartReport:
    """Move the energy of a module's random weights into their first terms, in place.

    `SpectralSharding` does this before the first round. Call it yourself to train `FedAvg`, or a single model, from the
    same weights.

    Args:
        module: Its sharded weights are changed.
        keep_ratio: Share of the terms that keep their size before the matrix is rescaled: the keep ratio of the
            smallest clients.
        tail: Factor on the other terms, in [0, 1].
        trained: Whether to change even weights that look trained.
        layers: Which layers are sharded: choices, or the plan that `validate` returned.
        workers: Processes that share the work; ``None`` for this process alone.

    Raises:
        ValueError: If an argument is out of range, a weight is not finite, or the module cannot be sharded.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> mlp = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2))
        >>> print(spectral_start(mlp, keep_ratio=0.1))
        Spectral start: the energy of 2 of 2 sharded matrices is now in 10% of the terms, which held 34% of it.
    """
    start = SpectralStart(tail, KEEP_RATIO("keep_ratio", keep_ratio), trained)
    return move_energy(module, plan_of(module, layers), start, workers or Workers())


@torch.no_grad()
def move_energy(module: nn.Module, plan: ModulePlan, start: SpectralStart, workers: Workers) -> StartReport:
    """Apply a spectral start whose keep ratio is given, in place."""
    keep_ratio = start.keep_ratio
    assert keep_ratio is not None, "that of the smallest clients, if the user gives none"

    def moved(name: str, matrix: Tensor) -> tuple[Tensor, ...]:
        """The new matrix, and the share of its energy that the first terms held; empty if unchanged."""
        factors, num_terms = factorize(matrix), plan.blocks[name].num_terms(keep_ratio)
        if is_concentrated(factors.s, num_terms, start.tail, torch.finfo(matrix.dtype).eps):
            return ()
        if not (start.trained or looks_random(factors.s, (matrix.shape[0], matrix.shape[1]))):
            return ()
        values = concentrated_values(factors.s, num_terms, start.tail)
        squares = factors.s**2
        return (factors.U * values @ factors.Vh).to(matrix.dtype), squares[:num_terms].sum() / squares.sum()

    found = of_each_matrix(module, plan, moved, workers)
    changed = {name: tensors for name, tensors in found.items() if tensors}
    matrices = {**matrices_of(module, plan), **{name: matrix for name, (matrix, _) in changed.items()}}
    for weight, after in assembled(module, plan, matrices.__getitem__):
        weight.copy_(after)
    held = fmean(float(share) for _, share in changed.values()) if changed else 0.0
    return StartReport(keep_ratio, list(changed), [name for name in found if name not in changed], held)
