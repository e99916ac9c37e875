"""Exact means over clients, which never hold a list of models: add a client, add up processes, finish.

Weights and weighted changes are rounded, each on its own, to whole steps, which are added in int64. So the bits of a
sum depend neither on the order of the clients nor on their processes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
MESSAGE = 2**22  # values that processes add up at a time
MOST_TERMS = 2**20  # clients in one round
ONE = 2.0**52  # steps in a weight of 1, once weights are scaled
LARGEST = 2.0**40  # about 1.1e12: what the sums have room for with 2^20 clients
FINE = 2.0**50  # steps in one unit
NEAR = 2.0**12  # units up to which a change is added in one part
COARSE_BITS = 40  # a coarse step is 2^40 steps
SMALL = 2**12  # values in a tensor up to which starting an operation takes longer than the operation itself


@torch.no_grad()
def largest_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest absolute value of each tensor, NaN if it holds one, 0 if it is empty, in one read from each device."""
    magnitudes = dict.fromkeys(tensors, 0.0)
    if not (filled := {name: tensor for name, tensor in tensors.items() if tensor.numel()}):
        return magnitudes
    values = list(filled.values())
    if len(devices := {tensor.device for tensor in values}) > 1:
        for device in devices:
            magnitudes |= largest_magnitudes({name: own for name, own in filled.items() if own.device == device})
        return magnitudes
    if devices == {torch.device("cpu")}:
        # several times as fast on a CPU as the infinity norm of `torch._foreach_norm`, which is not vectorised there
        ends = ((low.item(), high.item()) for low, high in map(torch.aminmax, values))
        found = [float(max(abs(low), abs(high))) for low, high in ends]
    else:  # a GPU reads all tensors of a type in one operation
        values = [tensor if tensor.is_floating_point() else tensor.double() for tensor in values]
        kinds = {tensor.dtype for tensor in values}
        norms = {kind: iter(torch._foreach_norm([t for t in values if t.dtype is kind], math.inf)) for kind in kinds}
        found = torch.stack([next(norms[tensor.dtype]) for tensor in values]).tolist()
    return magnitudes | dict(zip(filled, found, strict=True))


def can_be_summed(magnitude: float) -> bool:
    """Whether values up to a magnitude are finite and small enough for an exact sum."""
    return magnitude <= LARGEST


class SummandError(OverflowError):
    """What one client would add to a sum is not finite, or too large."""


def check_summable(*magnitudes: float) -> None:
    """Raise `SummandError` if values up to any of some magnitudes are not finite, or too large for an exact sum."""
    if wrong := [magnitude for magnitude in magnitudes if not can_be_summed(magnitude)]:
        raise SummandError(f"its contribution to the sums holds values up to {max(wrong):.0e}")


def largest_within(bound: float, values: Callable[[], Tensor], most: float = LARGEST) -> float:
    """Return a bound on magnitudes; or the largest one, if twice the bound (rounding adds to it) exceeds ``most``."""
    return bound if 2 * bound <= most else largest_magnitudes({"values": values()})["values"]


class Weights:
    r"""The weights of clients in a round's average, and their sum so far.

    They are scaled by the power of two above the cohort's total T, so that their sum is at most 1, and each is rounded
    once, on its own, to a whole number of steps of 2^-52. These whole numbers multiply the clients' tensors, and the
    result is divided by their sum. The weights of the mean thus differ from the given ones by at most
    :math:`2^{-52}\, T`; whole numbers, such as numbers of examples, do not change.

    Args:
        total: Sum of the weights of all clients asked, an upper bound for the sum over those that report.

    Attributes:
        sum: Sum of the weights so far, in steps.
        num_terms: Number of weights so far.

    Example:
        >>> forth, back = Weights(1.3), Weights(1.3)
        >>> in_steps = [forth.add(weight) for weight in (0.1, 0.2, 0.3, 0.7)]
        >>> in_steps = [back.add(weight) for weight in (0.7, 0.2, 0.1, 0.3)]
        >>> forth.value == back.value, 0.1 + 0.2 + 0.3 + 0.7 == 0.7 + 0.2 + 0.1 + 0.3
        (True, False)
    """

    def __init__(self, total: float) -> None:
        if not 0 <= total < math.inf:
            raise ValueError(f"`total_weight` must be finite and at least 0, got {total}.")
        self.total = total
        self._exponent = math.frexp(total)[1]
        self.sum = self.num_terms = 0

    @property
    def value(self) -> float:
        """Sum of the weights so far, in their own unit."""
        return math.ldexp(self.sum / ONE, self._exponent)

    @property
    def one(self) -> float:
        """A weight of 1, in steps."""
        return math.ldexp(ONE, -self._exponent)

    def add(self, weight: float) -> int:
        """Count one client's weight, and return it in steps.

        Raises:
            ValueError: If it is not between 0 and the total, or the weights sum to more than the total.
            OverflowError: If there are too many weights.
        """
        if not 0 <= weight <= self.total:
            raise ValueError(f"A client's weight must be between 0 and the total of {self.total:g}, got {weight}.")
        steps = self.in_steps(weight)
        self.count(steps, 1)
        return steps

    def in_steps(self, weight: float) -> int:
        """A weight in steps, without counting it."""
        return round(math.ldexp(weight, -self._exponent) * ONE)

    def count(self, steps: int, num_terms: int) -> None:
        """Count weights that were rounded elsewhere; errors as for `add`."""
        if self.num_terms + num_terms > MOST_TERMS:
            raise OverflowError(f"An exact sum has room for {MOST_TERMS} terms; ask fewer clients in a round.")
        # one step of slack for each term: the rounding of the weights and of their total
        if self.sum + steps > self.in_steps(self.total) + MOST_TERMS:
            raise ValueError(
                f"The weights sum to more than `total_weight`={self.total:g}; give the sum of all of them."
            )
        self.sum += steps
        self.num_terms += num_terms


def cut(steps: Tensor) -> Tensor:
    """Return the nearest whole numbers of coarse steps; ``steps``, float64, keeps the rest. Both are exact."""
    coarse = (steps / 2.0**COARSE_BITS).round_()
    steps.sub_(coarse, alpha=2.0**COARSE_BITS)
    return coarse


def join(steps: Tensor, coarse: Tensor | None = None) -> Tensor:
    """The sum of steps and of coarse steps, both int64, in steps, float64: rounded once."""
    if coarse is None:
        return steps.double()
    carry = steps >> COARSE_BITS
    rest = steps - (carry << COARSE_BITS)
    return rest.double().add_((coarse + carry).double(), alpha=2.0**COARSE_BITS)


class Peers(ABC):
    """The processes that train the same round; all of them call these methods together.

    Attributes:
        rank: Rank of this one, from 0.
        size: Number of processes.
    """

    rank: int
    size: int

    @abstractmethod
    def gather(self, value: T) -> list[T]:
        """Gather one value from every process, in the order of their ranks."""

    @abstractmethod
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace int64 tensors by their sums over processes, in place."""


class RunningMean(ABC):
    """A weighted mean that is summed over clients, one by one, and then over processes.

    Attributes:
        weights: The clients' weights so far.
        coarse: By name, the sums of coarse steps, int64, which other processes may lack.
    """

    def __init__(self, total_weight: float) -> None:
        self.weights = Weights(total_weight)
        self.coarse: dict[str, Tensor] = {}

    @abstractmethod
    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        """All other sums, int64, contiguous, and those of coarse steps of the named tensors."""


def add_up(processes: Peers, means: Sequence[RunningMean]) -> None:
    """Give every process the sums over all processes; what `Weights.count` refuses fails in all of them."""
    mine = [(mean.weights.sum, mean.weights.num_terms, set(mean.coarse)) for mean in means]
    totals = []
    for mean, gathered in zip(means, zip(*processes.gather(mine), strict=True), strict=True):
        steps, num_terms, coarse = zip(*gathered, strict=True)
        mean.weights.count(sum(steps) - mean.weights.sum, sum(num_terms) - mean.weights.num_terms)
        totals += mean.totals(set().union(*coarse))
    processes.add_up([message for total in totals for message in torch.split(total.view(-1), MESSAGE)])


class MeanChange(RunningMean):
    r"""Weighted mean over clients of the change of tensors during training, held whole or in parts.

    Changes are computed in the tensors' own type, unless that could overflow. Each weighted change is rounded once, on
    its own, to a whole number of steps of 2^-50 units, where the unit is the power of two above the tensor's largest
    magnitude before training, at least 1. A client that changed nothing adds exact zeros.

    With n clients of weights :math:`w_c` that sum to W, out of a total T, the error of the mean of changes
    :math:`\Delta_c` is at most

    .. math:: 2^{-50}\, n\, \tfrac{T}{W}\, \text{unit} + 2^{-51}\, \big(1 + n\, \tfrac{T}{W}\big) \max_c |\Delta_c|.

    The first term is the rounding of n weighted changes to the grid. In the second term, the 1 is the rounding of the
    products, of the sum and of the division; the rest is the rounding of weights, zero for whole numbers.

    A client may hold a part of a tensor ``by_index``: slices along a dimension, such as singular terms, or single
    entries. Slice i averages over holders, :math:`\sum_c w_c \Delta_{ci} / \sum_c w_c`; others stay.

    Args:
        before: The whole tensors that clients started from, by name; they are read again for every client.
        total_weight: Sum of the weights of all clients asked.
        absolute: Whether weights are used as they are, as the coefficients of an unbiased estimate, and not divided by
            their sum. The mean of a slice is then multiplied by the sum of the weights of all clients that reported,
            whether they held it or not.
        always_divided: Names of tensors whose weights are divided by their sum even if ``absolute`` is true.
        by_index: For each tensor of which clients may hold a part, the dimension of its slices; ``None`` for single
            entries of the flattened tensor.
        counts: Names of tensors that say which part of the model a client holds, and nothing about what it has learnt.

    Attributes:
        before, counts: As given.
        names: Names of the tensors.
        is_fixed: Whether the weights, the slices' holders and the counts stay as they are; see `fix`.
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
        counts: Collection[str] = (),
    ) -> None:
        super().__init__(total_weight)
        self.before, self.names, self.counts = dict(before), tuple(before), frozenset(counts)
        self.is_fixed = False
        self._absolute = frozenset(before).difference(always_divided) if absolute else frozenset()
        by_index = by_index or {}
        self._dims = {name: dim or 0 for name, dim in by_index.items()}
        flat = {n for n, t in before.items() if by_index.get(n, None if t.is_contiguous() else 0) is None}
        self._rows = {name: tensor.reshape(-1) if name in flat else tensor for name, tensor in before.items()}
        self._sums = {n: t.new_zeros(t.shape, dtype=torch.int64) for n, t in self._rows.items()}
        self.held = {name: self._sums[name].new_zeros(self._sums[name].shape[dim]) for name, dim in self._dims.items()}

    @cached_property
    def _largest(self) -> Mapping[str, float]:
        return largest_magnitudes(self.before)

    @cached_property
    def _units(self) -> Mapping[str, float]:
        magnitudes = self._largest.items()
        return {name: 2.0 ** max(math.frexp(x)[1], 0) if can_be_summed(x) else 1.0 for name, x in magnitudes}

    @cached_property
    def _small(self) -> tuple[Tensors, Tensor]:
        """Small tensors, which all clients hold whole, and their sums, one after another, of which each has a view."""
        whole = {n: t for n, t in self._rows.items() if t.ndim == 1 and n not in self._dims}
        kinds = [(t.dtype, t.device) for t in whole.values() if t.dtype in (torch.float32, torch.float64)]
        rows = {n: t for n, t in whole.items() if (t.dtype, t.device) in kinds[:1] and len(t) <= SMALL}
        together = torch.cat([self._sums[name] for name in rows] or [torch.empty(0)])
        self._sums |= zip(rows, torch.split(together, [len(t) for t in rows.values()]), strict=True)
        return rows, together

    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        return [*self._sums.values(), *self.held.values(), *map(self._coarse_sum, sorted(coarse))]

    @property
    def steps(self) -> dict[str, Tensor]:
        """By name, the sums of all but coarse steps, int64, in the tensors' shapes: views of the sums themselves.

        What one client adds is what these are after `add` in a mean of its own, with the same tensors and total.
        """
        return {name: total.view(self.before[name].shape) for name, total in self._sums.items()}

    def add(
        self, after: Tensors, weight: float, magnitudes: Mapping[str, float] | None = None, where: Tensors | None = None
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
        self, tensors: Tensors, weight: float, magnitudes: Mapping[str, float] | None, where: Tensors, is_change: bool
    ) -> None:
        magnitudes = largest_magnitudes({n: tensors[n] for n in self.names}) if magnitudes is None else magnitudes
        for name in self.names:
            for when, magnitude in (("before", self._largest[name]), ("after", magnitudes[name])):
                if not can_be_summed(magnitude):
                    raise OverflowError(
                        f"To be averaged exactly, values must be finite and at most {LARGEST:g} in magnitude; "
                        f"{name!r} has {magnitude:g} {when} local training."
                    )
        weight_in_steps = self.weights.in_steps(weight) if self.is_fixed else self.weights.add(weight)
        small, together = self._small
        near = all(self._largest[name] + magnitudes[name] <= NEAR * self._units[name] for name in small)
        near &= not (self.is_fixed and self.counts)  # which are not added again
        if near and len({tensors[name].dtype for name in small}) == 1:
            given, starts = (torch.cat([each[name].reshape(-1) for name in small]) for each in (tensors, small))
            steps = (given if is_change else given - starts).double()
            factors = [self._factor(name, weight_in_steps) for name in small]
            torch._foreach_mul_(torch.split(steps, [len(t) for t in small.values()]), factors)
            together.add_(steps.round_().long())
        else:
            small = {}
        for name, before in self._rows.items():
            if name in small or (self.is_fixed and name in self.counts):
                continue
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
            if self.is_fixed:
                continue
            if indices is not None:
                self.held[name].index_add_(0, indices, torch.ones_like(indices), alpha=weight_in_steps)
            elif name in self.held:
                self.held[name].add_(weight_in_steps)

    def _factor(self, name: str, weight_in_steps: float) -> float:
        """The exact factor from changes to weighted changes in steps."""
        return weight_in_steps * (FINE / ONE / self._units[name])

    def _coarse_sum(self, name: str) -> Tensor:
        if name not in self.coarse:
            self.coarse[name] = torch.zeros_like(self._sums[name])
        return self.coarse[name]

    def finish(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and mean change, float64, one after another; zero where no client contributed."""
        for name, tensor in self.before.items():
            yield name, self.change(name).view(tensor.shape)

    def change(self, name: str, indices: Tensor | None = None) -> Tensor:
        """Mean change of one tensor, float64, or of some of its slices."""
        dim = self._dims.get(name)
        parts = [sums[name] for sums in (self._sums, self.coarse) if name in sums]
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

    def fix(self) -> None:
        """Fix all divisors, and the counts, at what they are: from now on only changes are summed."""
        self.is_fixed = True

    def step(self, name: str) -> float:
        """A step of a tensor's sum, in units of a change times its weight."""
        return 1.0 / self._factor(name, self.weights.one)

    def take(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sums of changes by name, in steps, float64, and start them anew from zero."""
        for name in self.names:
            if name not in self.counts:
                yield name, join(self._sums[name], self.coarse.pop(name, None))
                self._sums[name].zero_()

    def put(self, name: str, steps: Tensor) -> None:
        """Add steps, int64, to a tensor's sum, except to slices that no client holds."""
        if (dim := self._dims.get(name)) is not None:
            steps = steps * (self.held[name] > 0).view(-1, *[1] * (steps.ndim - dim - 1))
        self._sums[name].add_(steps)

    def visited(self, name: str) -> Tensor:
        """Indices of the slices that a client of positive weight held, ascending."""
        return self.held[name].nonzero().squeeze(1)


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
