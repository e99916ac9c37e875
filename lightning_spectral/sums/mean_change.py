"""A running mean over clients, which never holds a list of models: add a client, add up processes, finish."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_spectral.sums.exact_sum import (
    FINE,
    NEAR,
    ONE,
    Weights,
    check_can_be_summed,
    cut,
    join,
    largest_magnitudes,
    unit_for,
)

Tensors = Mapping[str, Tensor]


class MeanChange:
    r"""Weighted mean over clients of the change of tensors during training, held whole or in parts.

    Changes are computed in the tensors' own type. Each weighted change is rounded once, on its own, to a whole number
    of steps of 2^-50 units, where the unit is the power of two above the tensor's largest magnitude before training, at
    least 1. These whole numbers are added in int64, so the bits of the sum depend neither on the order of the clients
    nor on their processes. A client that changed nothing adds exact zeros.

    With n clients of weights :math:`w_c` that sum to W, out of a total T, the error of the mean of changes
    :math:`\Delta_c` is at most

    .. math:: 2^{-50}\, n\, \tfrac{T}{W}\, \text{unit} + 2^{-51}\, \big(1 + n\, \tfrac{T}{W}\big) \max_c |\Delta_c|.

    The first term is the rounding of n weighted changes to the grid. In the second term, the 1 is the rounding of the
    products, of the sum and of the division; the rest is the rounding of the weights, which vanishes if they are whole
    numbers.

    A client may hold a part of a tensor ``by_index``: slices along a dimension, such as singular terms, or single
    entries. Slice i averages over its holders, :math:`\sum_c w_c \Delta_{ci} / \sum_c w_c`; slices held by no client do
    not change.

    Args:
        before: The whole tensors that clients started from, by name; they are read again for every client.
        total_weight: Sum of the weights of all clients asked.
        absolute: Whether weights are used as they are, as the coefficients of an unbiased estimate, and not divided by
            their sum. The mean of a slice is then multiplied by the sum of the weights of all clients that reported,
            whether they held it or not.
        always_divided: Names of tensors whose weights are divided by their sum even if ``absolute`` is true.
        by_index: For each tensor of which clients may hold a part, the dimension of its slices; ``None`` for single
            entries of the flattened tensor.

    Attributes:
        before: As given.
        names: Names of the tensors.
        weights: The clients' weights so far.
        held: For each tensor in ``by_index``, the weight of each slice's holders, in steps, int64.

    Note:
        A weight has 2^52 steps and all weights together at most 1, so changes of up to 2^12 units sum to 2^62 steps at
        most. A client that moves a tensor further adds a multiple of a coarse step of 2^40 steps to a sum of its own,
        and the remainder to the same sum as others. The coarse sum is created once a client needs it; that depends only
        on the largest magnitudes before and after the client's own training.

    Reference:
        Demmel & Nguyen (2015), "Parallel reproducible summation", here with grids that are fixed beforehand.

    Example:
        >>> mean = MeanChange({"b": torch.zeros(1)}, total_weight=4)
        >>> mean.add({"b": torch.tensor([1.0])}, weight=1)
        >>> mean.add({"b": torch.tensor([4.0])}, weight=3)
        >>> dict(mean.finish())
        {'b': tensor([3.2500], dtype=torch.float64)}

        >>> mean = MeanChange({"b": torch.zeros(3)}, total_weight=4, by_index={"b": 0})
        >>> mean.add({"b": torch.tensor([1.0, 1.0])}, weight=1, where={"b": torch.tensor([0, 1])})
        >>> mean.add({"b": torch.tensor([5.0])}, weight=3, where={"b": torch.tensor([1])})
        >>> dict(mean.finish())
        {'b': tensor([1., 4., 0.], dtype=torch.float64)}
    """

    def __init__(
        self,
        before: Tensors,
        total_weight: float,
        absolute: bool = False,
        always_divided: Collection[str] = (),
        by_index: Mapping[str, int | None] | None = None,
    ) -> None:
        self.before, self.names, self.weights = dict(before), tuple(before), Weights(total_weight)
        self._absolute = frozenset(before).difference(always_divided) if absolute else frozenset()
        by_index = by_index or {}
        self._dims = {name: dim or 0 for name, dim in by_index.items()}
        flat = {n for n, t in before.items() if by_index.get(n, None if t.is_contiguous() else 0) is None}
        self._rows = {name: tensor.reshape(-1) if name in flat else tensor for name, tensor in before.items()}
        self._largest = largest_magnitudes(before)
        self._units = {name: unit_for(magnitude) for name, magnitude in self._largest.items()}
        self._sums = {n: torch.zeros(t.shape, dtype=torch.int64, device=t.device) for n, t in self._rows.items()}
        self._coarse: dict[str, Tensor] = {}
        self.held = {name: self._sums[name].new_zeros(self._sums[name].shape[dim]) for name, dim in self._dims.items()}

    @property
    def coarse(self) -> Collection[str]:
        """Names of the tensors that have a coarse sum."""
        return self._coarse.keys()

    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        """All sums, int64, where the named tensors have a coarse one."""
        return [*self._sums.values(), *self.held.values(), *map(self._coarse_sum, sorted(coarse))]

    def add(
        self,
        after: Tensors,
        weight: float,
        magnitudes: Mapping[str, float] | None = None,
        where: Tensors | None = None,
    ) -> None:
        """Add one client's tensors, as it returned them, with its weight.

        Args:
            after: At least the tensors of ``before``, or the client's parts of them.
            weight: The client's weight.
            magnitudes: `largest_magnitudes` of the tensors, if already known.
            where: For each tensor of which the client held a part, the indices of its slices, distinct, shape ``(n,)``;
                for single entries, their positions in the flattened whole tensor, in the shape of the part.

        Raises:
            OverflowError: If a value is not finite or too large, or there are too many clients.
            ValueError: If weights are negative or sum to more than their total.
        """
        self._add(after, weight, magnitudes, where or {}, is_change=False)

    def add_change(self, change: Tensors, weight: float, magnitudes: Mapping[str, float] | None = None) -> None:
        """Add the change that one client returned, e.g. compressed, in place of its tensors; errors as for `add`.

        The change is summed as it is, of any floating-point type; it is not rounded to the type of the tensors. Tensors
        held by index must be whole.

        Example:
            >>> mean = MeanChange({"b": torch.tensor([1000.0])}, total_weight=1)
            >>> mean.add_change({"b": torch.tensor([0.125], dtype=torch.bfloat16)}, weight=1)
            >>> dict(mean.finish())
            {'b': tensor([0.1250], dtype=torch.float64)}
        """
        self._add(change, weight, magnitudes, {}, is_change=True)

    @torch.no_grad()
    def _add(
        self,
        tensors: Tensors,
        weight: float,
        magnitudes: Mapping[str, float] | None,
        where: Tensors,
        is_change: bool,
    ) -> None:
        magnitudes = largest_magnitudes({n: tensors[n] for n in self.names}) if magnitudes is None else magnitudes
        for name in self.names:
            check_can_be_summed(name, self._largest[name], magnitudes[name])
        weight_in_steps = self.weights.add(weight)
        for name, before in self._rows.items():
            given = tensors[name].reshape(-1) if before.ndim == 1 else tensors[name]
            indices = where[name].reshape(-1).to(before.device) if name in self.held and name in where else None
            farthest, dim = self._largest[name] + magnitudes[name], self._dims.get(name, 0)
            overflows = before.is_floating_point() and farthest > torch.finfo(before.dtype).max
            is_far, factor = farthest > NEAR * self._units[name], self._factor(name, weight_in_steps)
            sums = (self._sums[name], self._coarse_sum(name)) if is_far else (self._sums[name],)
            for own, new, (old, *totals) in _in_blocks(given, indices, dim, (before, *sums)):
                if is_change:
                    change = new.clone()
                else:
                    old = old if own is None else old.index_select(dim, own)
                    change = new.double() - old.double() if overflows else new - old
                steps = change.double().mul_(factor)
                coarse = [cut(steps)] if is_far else []
                for total, part in zip(totals, [steps.round_(), *coarse], strict=True):
                    if own is None:
                        total.add_(part.long())
                    else:
                        total.index_add_(dim, own, part.long())
            if indices is not None:
                self.held[name].index_add_(0, indices, torch.ones_like(indices), alpha=weight_in_steps)
            elif name in self.held:
                self.held[name].add_(weight_in_steps)

    def _factor(self, name: str, weight_in_steps: float) -> float:
        """The exact factor from changes to weighted changes in steps."""
        return weight_in_steps * (FINE / ONE / self._units[name])

    def _coarse_sum(self, name: str) -> Tensor:
        if name not in self._coarse:
            self._coarse[name] = torch.zeros_like(self._sums[name])
        return self._coarse[name]

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and mean change, float64, one after another; zero where no client contributed."""
        for name, tensor in self.before.items():
            yield name, self.change(name).view(tensor.shape)

    def change(self, name: str, indices: Tensor | None = None) -> Tensor:
        """Mean change of one tensor, float64, or of some of its slices."""
        dim = self._dims.get(name)
        parts = [sums[name] for sums in (self._sums, self._coarse) if name in sums]
        if indices is not None:
            parts = [part.index_select(dim or 0, indices) for part in parts]
        total = join(*parts)
        if dim is None:
            divisor = self.weights.one if name in self._absolute else float(max(self.weights.sum, 1))
            return total.div_(self._factor(name, divisor))
        held = self.held[name] if indices is None else self.held[name][indices]
        holders = held.clamp(min=1).double().mul_(self._factor(name, 1.0))
        mean = total.div_(holders.view(-1, *[1] * (total.ndim - dim - 1)))
        return mean.mul_(self.weights.value) if name in self._absolute else mean

    def visited(self, name: str) -> Tensor:
        """Indices of the slices that a client of positive weight held, ascending."""
        return self.held[name].nonzero().squeeze(1)

    @property
    def share_held(self) -> float:
        """Share of all slices that a client of positive weight held."""
        visited = sum(int(held.count_nonzero()) for held in self.held.values())
        return visited / max(1, sum(map(len, self.held.values())))


def _in_blocks(
    part: Tensor, indices: Tensor | None, dim: int, whole: Sequence[Tensor]
) -> Iterator[tuple[Tensor | None, Tensor, Sequence[Tensor]]]:
    """Yield runs of rows of a part, or of all, with their slices' indices and where these are in the whole tensors."""
    size = rows_in_a_block(part)
    if len(part) <= size:
        yield indices, part, whole
    elif indices is None or dim != 0:
        for rows, *wholes in zip(*(torch.split(tensor, size) for tensor in (part, *whole)), strict=True):
            yield indices, rows, wholes
    else:  # a row is a slice
        for own, rows in zip(torch.split(indices, size), torch.split(part, size), strict=True):
            yield own, rows, whole


def rows_in_a_block(tensor: Tensor) -> int:
    """Number of slices of the first dimension to process at a time, at least one.

    On a CPU a block fits its cache, elsewhere it keeps the device busy.
    """
    block = 2**16 if tensor.device.type == "cpu" else 2**22
    return max(1, block * len(tensor) // max(tensor.numel(), 1))
