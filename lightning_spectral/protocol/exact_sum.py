"""A sum whose bits do not depend on the order of its terms, nor on who added which."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GRIDS = (2.0**-60, 2.0**-20, 2.0**20)  # steps of the parts, finest first
MOST_TERMS = 2**13
LARGEST = 2.0**60
_BLOCK = 2**16  # values that are cut at a time on the CPU: what fits its cache


class ExactSum:
    r"""Sum of weighted tensors of one shape, the same to the last bit in any order and over any processes.

    Floating-point addition rounds, and what it rounds depends on what was there before. Sums of integers do not. So
    every term is cut at fixed places into parts that are multiples of 2^20, 2^-20 and 2^-60, each by
    :math:`(x + A) - A` with a large constant A, and each part has its own float64 sum. A part is at most half a step
    of the next coarser grid; 2^13 of them stay below 2^53 steps, up to which float64 adds integers without rounding.

    What is finer than 2^-60 in a weighted term is rounded, once and in the term itself: an error of at most 2^-61.
    For a mean over clients that is 2^-61 over their mean number of examples. Zeros add nothing. The coarsest part
    exists only once a term needs it.

    Args:
        shape: Shape of every term.
        device: Where the sum lives.

    Reference:
        Demmel & Nguyen (2015), "Parallel reproducible summation", with cuts that are fixed beforehand.

    Example:
        >>> forth, back = ExactSum((1,)), ExactSum((1,))
        >>> for value in (1e5, 1e-12, -1e5):
        ...     forth.add(torch.tensor([value], dtype=torch.float64))
        >>> for value in (-1e5, 1e5, 1e-12):
        ...     back.add(torch.tensor([value], dtype=torch.float64))
        >>> bool(forth.total() == back.total()), (1e5 + 1e-12) - 1e5 == 1e-12
        (True, False)
    """

    def __init__(self, shape: Sequence[int], device: torch.device | str | None = None) -> None:
        self.parts = [torch.zeros(tuple(shape), dtype=torch.float64, device=device) for _ in GRIDS[:2]]
        self.num_terms = 0

    @torch.no_grad()
    def add(self, values: Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times a tensor of the sum's shape.

        Raises:
            OverflowError: If a value is not finite or too large, or there were too many terms.
        """
        levels = self._start_term(values, weight)
        pieces = [values.reshape(-1), *(part.view(-1) for part in self.parts[:levels])]
        size = _BLOCK if values.device.type == "cpu" else max(values.numel(), 1)
        scratch = torch.empty((2, min(size, values.numel())), dtype=torch.float64, device=values.device)
        for block, *sums in zip(*(torch.split(piece, size) for piece in pieces), strict=True):
            rest, cut = scratch[:, : len(block)]
            rest.copy_(block).mul_(weight)
            for level in reversed(range(levels)):
                sums[level].add_(_cut(rest, level, cut))

    @torch.no_grad()
    def add_at(self, dim: int, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times a tensor to some slices of the sum.

        Args:
            dim: Dimension of the slices.
            indices: Which slices, distinct, shape ``(n,)``.
            values: The sum's shape, with n in dimension ``dim``.
            weight: A factor.

        Raises:
            OverflowError: As for `add`.
        """
        levels = self._start_term(values, weight)
        rest = values.double() * weight
        cut = torch.empty_like(rest)
        for level in reversed(range(levels)):
            self.parts[level].index_add_(dim, indices, _cut(rest, level, cut))

    def merge(self, other: ExactSum) -> None:
        """Add another sum of the same shape."""
        self.count(other.num_terms)
        self.widen(len(other.parts))
        for mine, theirs in zip(self.parts, other.parts, strict=False):
            mine.add_(theirs)

    def widen(self, levels: int) -> None:
        """Have at least so many parts, 2 or 3."""
        while len(self.parts) < levels:
            self.parts.append(torch.zeros_like(self.parts[0]))

    def count(self, more: int) -> None:
        """Note that there are more terms; ``OverflowError`` if that is more than it has room for."""
        if self.num_terms + more > MOST_TERMS:
            raise OverflowError(f"An exact sum has room for {MOST_TERMS} terms; ask fewer clients in a round.")
        self.num_terms += more

    def total(self) -> Tensor:
        """The sum, float64; a new tensor."""
        total = self.parts[0] + self.parts[1]
        return total if len(self.parts) == 2 else total.add_(self.parts[2])

    def _start_term(self, values: Tensor, weight: float) -> int:
        """Into how many parts this term has to be cut."""
        largest = largest_magnitude([values]) * abs(weight)
        if not largest <= LARGEST:
            raise OverflowError(f"A term of an exact sum must be finite and at most {LARGEST:g}, got {largest:g}.")
        self.count(1)
        levels = 2 if largest <= GRIDS[2] / 2 else 3  # what is at most half a step has no coarsest part
        self.widen(levels)
        return levels


def largest_magnitude(tensors: Sequence[Tensor]) -> float:
    """Largest absolute value of some tensors; NaN if there is one. One look at the device for all of them."""
    ends = [end for tensor in tensors if tensor.numel() for end in torch.aminmax(tensor.detach())]
    return float(torch.stack([end.double() for end in ends]).abs().max()) if ends else 0.0


def _cut(rest: Tensor, level: int, out: Tensor) -> Tensor:
    """The nearest multiples of a grid's step; ``rest`` keeps what is finer, if there is a finer grid. All is exact."""
    large = 1.5 * 2.0**52 * GRIDS[level]  # between 2^52 and 2^53 steps, where float64 holds multiples of the step alone
    torch.add(rest, large, out=out)
    out.sub_(large)
    if level:
        rest.sub_(out)
    return out
