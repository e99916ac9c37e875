"""Running sums over clients: add one client, merge two sums, finish the average. Never a list of models."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class MeanChange:
    """Weighted mean over clients of how much dense tensors changed while they trained.

    Sums are float64. A client that changed nothing adds exact zeros.

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
        self.sums = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in before.values()]
        self.weight = 0.0

    @torch.no_grad()
    def add(self, after: Tensors, weight: float) -> None:
        """Add one client's tensors, as they came back, with its weight."""
        if not self.names:
            return
        changes = torch._foreach_sub([after[name] for name in self.names], list(self.before.values()))
        torch._foreach_add_(self.sums, [change.double() for change in changes], alpha=weight)
        self.weight += weight

    def merge(self, other: MeanChange) -> None:
        """Add another sum over the same tensors."""
        if self.names:
            torch._foreach_add_(self.sums, other.sums)
        self.weight += other.weight

    def finish(self) -> dict[str, Tensor]:
        """The mean change of each tensor, float64; zero where nobody contributed."""
        return {name: total / max(self.weight, 1e-300) for name, total in zip(self.names, self.sums, strict=True)}


class MeanTermChange:
    r"""Weighted mean, term by term, of how much the vectors of one layer's singular terms changed.

    Term i averages over the clients that held it, :math:`\sum_c D_c \Delta u_i^c / \sum_c D_c`; a term that nobody
    held does not change (Korzhenkov & Louizos 2024, section 3.1, step 3).

    Args:
        u: Left vectors before training, shape ``(c_out, N)``.
        v: Right vectors before training, shape ``(N, c_in k)``.
    """

    def __init__(self, u: Tensor, v: Tensor) -> None:
        self.u_sum = torch.zeros_like(u, dtype=torch.float64)
        self.v_sum = torch.zeros_like(v, dtype=torch.float64)
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
        self.u_sum.index_add_(1, terms, u_change.double(), alpha=weight)
        self.v_sum.index_add_(0, terms, v_change.double(), alpha=weight)
        self.weight.index_add_(0, terms, torch.full_like(terms, 1, dtype=torch.float64), alpha=weight)

    def merge(self, other: MeanTermChange) -> None:
        """Add another sum over the same layer."""
        self.u_sum += other.u_sum
        self.v_sum += other.v_sum
        self.weight += other.weight

    def finish(self) -> tuple[Tensor, Tensor, Tensor]:
        """Visited terms, shape ``(m,)``, and the mean change of their vectors, ``(c_out, m)`` and ``(m, c_in k)``."""
        visited = self.weight.nonzero().squeeze(1)
        weight = self.weight[visited]
        return visited, self.u_sum[:, visited] / weight, self.v_sum[visited] / weight[:, None]
