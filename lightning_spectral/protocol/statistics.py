"""Running sums over clients: add one client, merge two sums, finish the average. Never a list of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lightning_spectral.protocol.exact_sum import ExactSum
from lightning_spectral.server.processes import Processes

Tensors = Mapping[str, Tensor]


class RunningMean(Protocol):
    """What several processes add up once each has its clients' part of a weighted mean."""

    @property
    def sums(self) -> list[ExactSum]:
        """Sums of weighted changes."""

    @property
    def weight(self) -> Tensor:
        """Sum of the weights, whole numbers in float64."""


class MeanChange:
    """Weighted mean over clients of how much dense tensors changed while they trained.

    The sum is exact (`ExactSum`): its bits do not depend on the order of the clients. A client that changed nothing
    adds exact zeros.

    Args:
        before: The tensors every client started from, by name.

    Example:
        >>> mean = MeanChange({"b": torch.zeros(1)})
        >>> mean.add({"b": torch.tensor([1.0])}, weight=1)
        >>> mean.add({"b": torch.tensor([4.0])}, weight=3)
        >>> mean.finish()
        {'b': tensor([3.2500], dtype=torch.float64)}
    """

    def __init__(self, before: Tensors) -> None:
        self.before = dict(before)
        self.names = tuple(before)
        self._sizes = [tensor.numel() for tensor in before.values()]
        device = next((tensor.device for tensor in before.values()), None)
        self.sums = [ExactSum((sum(self._sizes),), device)]
        self.weight = torch.zeros((), dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, after: Tensors, weight: float) -> None:
        """Add one client's tensors, as they came back, with its weight."""
        if self.names:
            changes = torch._foreach_sub([after[name] for name in self.names], list(self.before.values()))
            self.sums[0].add(torch.cat([change.reshape(-1) for change in changes]), weight)
        self.weight += weight

    def merge(self, other: MeanChange) -> None:
        """Add another sum over the same tensors."""
        _merge(self, other)

    def finish(self) -> dict[str, Tensor]:
        """The mean change of each tensor, float64; zero where nobody contributed."""
        total = self.sums[0].total().div_(self.weight.clamp(min=1e-300))  # in place: float64 is large
        means = torch.split(total, self._sizes)
        return {name: mean.view(self.before[name].shape) for name, mean in zip(self.names, means, strict=False)}


class MeanTermChange:
    r"""Weighted mean, term by term, of how much the vectors of one layer's singular terms changed.

    Term i averages over the clients that held it, :math:`\sum_c D_c \Delta u_i^c / \sum_c D_c`; a term that nobody
    held does not change (Korzhenkov & Louizos 2024, section 3.1, step 3). The sums are exact, as in `MeanChange`.

    Args:
        u: Left vectors before training, shape ``(c_out, N)``.
        v: Right vectors before training, shape ``(N, c_in k)``.
    """

    def __init__(self, u: Tensor, v: Tensor) -> None:
        self.sums = [ExactSum(u.shape, u.device), ExactSum(v.shape, v.device)]
        self.weight = torch.zeros(u.shape[1], dtype=torch.float64, device=u.device)

    @torch.no_grad()
    def add(self, terms: Tensor, u_change: Tensor, v_change: Tensor, weight: float) -> None:
        """Add one client.

        Args:
            terms: Indices of the terms it held, distinct, shape ``(n,)``.
            u_change: Change of its left vectors, shape ``(c_out, n)``.
            v_change: Change of its right vectors, shape ``(n, c_in k)``.
            weight: Its number of examples D.
        """
        self.sums[0].add_at(1, terms, u_change, weight)
        self.sums[1].add_at(0, terms, v_change, weight)
        self.weight.index_add_(0, terms, torch.full_like(terms, 1, dtype=torch.float64), alpha=weight)

    def merge(self, other: MeanTermChange) -> None:
        """Add another sum over the same layer."""
        _merge(self, other)

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Visited terms, shape ``(m,)``, and the mean change of their vectors, ``(c_out, m)`` and ``(m, c_in k)``."""
        visited = self.weight.nonzero().squeeze(1)
        weight = self.weight[visited]
        u_sum, v_sum = (total.total() for total in self.sums)
        return visited, u_sum[:, visited] / weight, v_sum[visited] / weight[:, None]


def _merge(mine: RunningMean, theirs: RunningMean) -> None:
    mine.weight.add_(theirs.weight)
    for total, other in zip(mine.sums, theirs.sums, strict=True):
        total.merge(other)


def add_up(processes: Processes, means: Sequence[RunningMean]) -> None:
    """Give every process the sums of all: exact, so that it does not matter who trained which client."""
    if processes.size == 1:
        return
    sums = [total for mean in means for total in mean.sums]
    said = processes.gather([(len(total.parts), total.num_terms) for total in sums])
    for total, of_all in zip(sums, zip(*said, strict=True), strict=True):
        total.widen(max(levels for levels, _ in of_all))
        total.count(sum(num_terms for _, num_terms in of_all) - total.num_terms)
    processes.add_up([*(mean.weight for mean in means), *(part for total in sums for part in total.parts)])
