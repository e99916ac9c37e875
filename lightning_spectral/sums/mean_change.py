"""A running mean over clients, which never holds a list of models: add a client, add up processes, finish."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from lightning_spectral.sums.change_blocks import Block, ChangeBlocks, put_differences, rows_in_a_block
from lightning_spectral.sums.exact_sum import ExactSum, Weights, cut, largest_magnitudes, unit_for

Tensors = Mapping[str, Tensor]


class MeanChange:
    r"""Weighted mean over clients of the change of tensors during training, held whole or in parts.

    Changes are computed in the tensors' own type; their sum is exact (`ExactSum`), so its bits do not depend on the
    order of the clients. A client that changed nothing adds exact zeros.

    With n clients of weights :math:`w_c` that sum to W, out of a total T, the error of the mean of changes
    :math:`\Delta_c` is at most

    .. math:: 2^{-50}\, n\, \tfrac{T}{W}\, \text{unit} + 2^{-51}\, \big(1 + n\, \tfrac{T}{W}\big) \max_c |\Delta_c|.

    The first term is the rounding of n weighted changes to the grid, whose unit is the power of two above the
    tensor's largest magnitude before training, at least 1. In the second term, the 1 is the rounding of the products,
    of the addition of two sums and of the division; the rest is the rounding of the weights, which vanishes if they
    are whole numbers.

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
        held: For each tensor in ``by_index``, the weight of each slice's holders, in steps, float64.

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
        self._sliced = {n: before[n].reshape(-1) if dim is None else before[n] for n, dim in by_index.items()}
        magnitudes = largest_magnitudes(before)
        # a tensor held by index has blocks of its own, which a client's part leaves out
        kinds = {n: (unit_for(magnitude), n if n in self._dims else "") for n, magnitude in magnitudes.items()}
        self._blocks = ChangeBlocks(before, kinds)
        device = next((tensor.device for tensor in before.values()), None)
        self._fine = torch.zeros(self._blocks.size, dtype=torch.float64, device=device)
        shapes = {name: tensor.shape for name, tensor in {**before, **self._sliced}.items()}
        fine = {name: self._fine[self._blocks.ranges[name]].view(shape) for name, shape in shapes.items()}
        self._sums = {name: ExactSum(fine[name], magnitude) for name, magnitude in magnitudes.items()}
        self.held = {name: self._fine.new_zeros(shapes[name][dim]) for name, dim in self._dims.items()}

    @property
    def sums(self) -> list[ExactSum]:
        """One sum for each tensor."""
        return list(self._sums.values())

    @property
    def totals(self) -> list[Tensor]:
        """The fine sums of all tensors, as one vector, and the weights of the slices' holders."""
        return [self._fine, *self.held.values()]

    @torch.no_grad()
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
        known, steps = self._checked(after, weight, magnitudes)
        parts = self.held.keys() & where.keys() if where else set()
        if whole := {name: after[name] for name in self.names if name not in parts}:
            self._add_whole(whole, known, steps)
        for name, held in self.held.items():
            if where and name in parts:
                self._add_part(name, after[name], where[name].to(held.device), known[name], steps)
            else:
                held.add_(steps)

    @torch.no_grad()
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
        known, steps = self._checked(change, weight, magnitudes)
        whole = {name: change[name] for name in self.names}
        self._add_blocks(self._blocks.given(whole), self._wide(whole, known), steps)
        for held in self.held.values():
            held.add_(steps)

    def _checked(
        self, tensors: Tensors, weight: float, magnitudes: Mapping[str, float] | None
    ) -> tuple[Mapping[str, float], float]:
        """The largest magnitudes, all of which can be summed, and the client's weight in steps, which is counted."""
        known = largest_magnitudes({name: tensors[name] for name in self.names}) if magnitudes is None else magnitudes
        for name, total in self._sums.items():
            total.check(name, known[name])
        return known, float(self.weights.add(weight))

    def _wide(self, tensors: Tensors, largest: Mapping[str, float]) -> set[str]:
        return {name for name in tensors if self._sums[name].is_wide(largest[name])}

    def _add_whole(self, after: Tensors, largest: Mapping[str, float], steps: float) -> None:
        in_float64 = {name for name in after if self._sums[name].overflows(largest[name], self.before[name].dtype)}
        self._add_blocks(self._blocks.changes(after, in_float64), self._wide(after, largest), steps)

    def _add_blocks(self, blocks: Iterable[tuple[Block, Tensor]], wide: Collection[str], steps: float) -> None:
        for block, change in blocks:
            change.mul_(self._sums[block.pieces[0].name].factor(steps))
            for piece in block.pieces if wide else ():
                if piece.name in wide:
                    run = slice(piece.start - block.where.start, piece.stop - block.where.start)
                    self._add_coarse(piece.name, piece.start, cut(change[run]))
            self._fine[block.where].add_(change.round_())

    def _add_coarse(self, name: str, start: int, coarse: Tensor) -> None:
        offset = start - self._blocks.ranges[name].start
        self._sums[name].widen().view(-1)[offset : offset + len(coarse)].add_(coarse)

    def _add_part(self, name: str, after: Tensor, indices: Tensor, largest: float, steps: float) -> None:
        total, dim, before = self._sums[name], self._dims[name], self._sliced[name]
        if before.ndim == 1:
            after, indices = after.reshape(-1), indices.reshape(-1)
        wide, in_float64 = total.is_wide(largest), total.overflows(largest, before.dtype)
        for own, rows, trained in _in_blocks(after, indices, dim):
            change = torch.empty(trained.shape, dtype=torch.float64, device=trained.device)
            put_differences([(trained, before[rows].index_select(dim, own), in_float64)], [change])
            change.mul_(total.factor(steps))
            if wide:
                total.widen()[rows].index_add_(dim, own, cut(change))
            total.fine[rows].index_add_(dim, own, change.round_())
        self.held[name].index_add_(0, indices, torch.ones_like(indices, dtype=torch.float64), alpha=steps)

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and mean change, float64, one after another; zero where no client contributed."""
        for name, tensor in self.before.items():
            yield name, self.change(name).view(tensor.shape)

    def change(self, name: str, indices: Tensor | None = None) -> Tensor:
        """Mean change of one tensor, float64, or of some of its slices."""
        total, dim = self._sums[name], self._dims.get(name)
        if dim is None:
            divisor = self.weights.one if name in self._absolute else float(max(self.weights.sum, 1))
            return total.total().div_(total.factor(divisor))
        held = self.held[name] if indices is None else self.held[name][indices]
        holders = held.clamp(min=1).mul_(total.factor(1.0)).view(-1, *[1] * (total.fine.ndim - dim - 1))
        mean = total.total(dim, indices).div_(holders)
        return mean.mul_(self.weights.value) if name in self._absolute else mean

    def visited(self, name: str) -> Tensor:
        """Indices of the slices that a client of positive weight held, ascending."""
        return self.held[name].nonzero().squeeze(1)

    @property
    def share_held(self) -> float:
        """Share of all slices that a client of positive weight held."""
        visited = sum(int(held.count_nonzero()) for held in self.held.values())
        return visited / max(1, sum(map(len, self.held.values())))


def without_rows(after: Tensors, positions: Tensors, rows: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A client's tensors and their places for `MeanChange.add`, without some rows of some tensors.

    ``positions`` are as ``where`` in `MeanChange.add`, for single entries; ``rows`` are indices along the first
    dimension of each tensor.
    """
    left, where = dict(after), dict(positions)
    for name in rows.keys() & after.keys():
        tensor = after[name]
        all_positions = positions.get(name, torch.arange(tensor.numel()).view(tensor.shape))
        stays = torch.ones(len(tensor), dtype=torch.bool).index_fill_(0, rows[name].cpu(), False)
        left[name], where[name] = tensor[stays.to(tensor.device)], all_positions[stays.to(all_positions.device)]
    return left, where


def _in_blocks(after: Tensor, indices: Tensor, dim: int) -> Iterator[tuple[Tensor, slice, Tensor]]:
    """Yield the slices' indices in some rows of ``after``, the place of the rows in the whole tensor, and the rows.

    If a row is a slice, its place is in the indices; else each row has all slices, and keeps its place.
    """
    size = rows_in_a_block(after)
    for first in range(0, len(after) if len(indices) else 0, size):
        run = slice(first, first + size)
        yield (indices[run], slice(None), after[run]) if dim == 0 else (indices, run, after[run])
