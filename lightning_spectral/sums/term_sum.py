"""Exact sums of the changes of a factor's vectors, in which each client adds to the vectors of its own terms."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_spectral.sums.change_blocks import put_differences, rows_in_a_block
from lightning_spectral.sums.exact_sum import ExactSum, cut


class TermSum:
    """Sum over clients of the weighted changes of the vectors of their terms.

    Args:
        name: Name of the factor in error messages.
        before: All vectors before training, one for each of the N terms; they are read again for every client.
        dim: Dimension of the terms: 1 for left vectors, ``(c_out, N)``, and 0 for right ones, ``(N, c_in k)``.
        magnitude: Largest absolute value of ``before``.

    Attributes:
        sum: The sum, of the shape of ``before``.
    """

    def __init__(self, name: str, before: Tensor, dim: int, magnitude: float) -> None:
        self.sum = ExactSum(torch.zeros(before.shape, dtype=torch.float64, device=before.device), magnitude)
        self._name, self._before, self._dim = name, before, dim

    def check(self, largest: float) -> None:
        """Raise ``OverflowError`` if vectors of the given largest magnitude cannot be added."""
        self.sum.check(self._name, largest)

    def add(self, terms: Tensor, after: Tensor, largest: float, steps: float) -> None:
        """Add one client.

        Args:
            terms: Indices of its terms, distinct, shape ``(n,)``.
            after: Their vectors after training.
            largest: The largest magnitude of ``after``.
            steps: The client's weight in steps.
        """
        wide, in_float64 = self.sum.is_wide(largest), self.sum.overflows(largest, self._before.dtype)
        factor = self.sum.factor(steps)
        for own_terms, here, trained in self._blocks(terms, after):
            start = self._before[here].index_select(self._dim, own_terms)
            change = torch.empty(trained.shape, dtype=torch.float64, device=trained.device)
            put_differences([(trained, start, in_float64)], [change])
            change.mul_(factor)
            if wide:
                self.sum.widen()[here].index_add_(self._dim, own_terms, cut(change))
            self.sum.fine[here].index_add_(self._dim, own_terms, change.round_())

    def mean(self, terms: Tensor, weight: Tensor) -> Tensor:
        """The vectors' sums over the weights of their terms, in steps; float64."""
        total = self.sum.total(self._dim, terms)
        return total.div_(self.sum.factor(weight if self._dim == 1 else weight[:, None]))

    def _blocks(self, terms: Tensor, after: Tensor) -> Iterator[tuple[Tensor, slice, Tensor]]:
        """Yield the terms of some rows of ``after``, their place in the sum, and the rows.

        A row of right vectors is a term; a row of left vectors is an output channel with every term.
        """
        size = rows_in_a_block(after)
        for first in range(0, len(after) if len(terms) else 0, size):
            rows = after[first : first + size]
            if self._dim == 0:
                yield terms[first : first + size], slice(None), rows
            else:
                yield terms, slice(first, first + size), rows
