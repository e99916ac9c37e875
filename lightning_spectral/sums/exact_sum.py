"""Sums whose bits do not depend on the order of their terms: of clients' weights, and of their changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LARGEST = 2.0**40  # about 1.1e12: what the sums of `exact_sum` have room for with 2^13 clients


@torch.no_grad()
def largest_magnitudes(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest absolute value of each tensor, NaN if it holds one, 0 if it is empty, in one read from the device."""
    magnitudes = dict.fromkeys(tensors, 0.0)
    filled = [name for name, tensor in tensors.items() if tensor.numel()]
    if filled:
        # several times as fast on a CPU as the infinity norm of `torch._foreach_norm`, which is not vectorised there
        ends = [_exact(end) for name in filled for end in torch.aminmax(tensors[name])]
        found = torch.stack(ends).view(-1, 2).abs().amax(1)
        magnitudes.update(zip(filled, found.tolist(), strict=True))
    return magnitudes


def can_be_summed(magnitude: float) -> bool:
    """Whether values up to a magnitude are finite and small enough for an exact sum."""
    return magnitude <= LARGEST


def largest_within(bound: float, values: Callable[[], Tensor]) -> float:
    """Return a bound on magnitudes, or the computed largest magnitude if the bound cannot guarantee an exact sum."""
    sure = can_be_summed(2 * bound)  # twice, for what rounding adds
    return bound if sure else largest_magnitudes({"values": values()})["values"]


def _exact(end: Tensor) -> Tensor:
    """The value in a type that can be stacked with any floating-point type without loss."""
    return end if end.is_floating_point() else end.double()


MOST_TERMS = 2**13  # clients in one round
ONE = 2.0**52  # steps in a weight of 1, once weights are scaled


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
        self.sum = 0
        self.num_terms = 0

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
        steps = self._steps(weight)
        self.count(steps, 1)
        return steps

    def count(self, steps: int, num_terms: int) -> None:
        """Count weights that were rounded elsewhere; errors as for `add`."""
        if self.num_terms + num_terms > MOST_TERMS:
            raise OverflowError(f"An exact sum has room for {MOST_TERMS} terms; ask fewer clients in a round.")
        # one step of slack for each term: the rounding of the weights and of their total
        if self.sum + steps > self._steps(self.total) + MOST_TERMS:
            raise ValueError(
                f"The weights sum to more than `total_weight`={self.total:g}; give the sum of all of them."
            )
        self.sum += steps
        self.num_terms += num_terms

    def _steps(self, weight: float) -> int:
        return round(math.ldexp(weight, -self._exponent) * ONE)


FINE = 2.0**50  # fine steps in one unit
COARSE = 2.0**39  # fine steps in one coarse step
NARROW = 4.0  # units up to which a change has no coarse part


class ExactSum:
    """Sum of weighted changes of one tensor, bit for bit the same in any order and over any processes.

    Floating-point addition rounds its result, so a sum depends on the order of its terms. Sums of whole numbers do not,
    if they stay below 2^53 in float64. Each weighted change is therefore rounded once, on its own, to a whole number
    of fine steps of 2^-50 units, and these are summed. The unit is the power of two above the tensor's largest
    magnitude before training, at least 1. The weights sum to at most 1 (`Weights`), so changes of at most 4 units
    never sum to more than 2^52 steps.

    A client that moves a tensor further adds two numbers for each value: a multiple of a coarse step, which is 2^39
    fine steps and has its own sum, and the remainder, at most 2^38 fine steps. For 2^13 clients both sums stay below
    2^53 steps. The coarse sum is created once a client needs it; that depends only on the largest magnitudes before
    and after the client's own training.

    The rounding error is at most half a fine step for each client: :math:`2^{-51}` units. Zeros add nothing.

    Attributes:
        fine: Sum of fine steps, float64; at first the zeros given.
        coarse: Sum of coarse steps, of the same shape; ``None`` until a term needs it.
        unit: The unit.

    Reference:
        Demmel & Nguyen (2015), "Parallel reproducible summation", here with grids that are fixed beforehand.
    """

    def __init__(self, fine: Tensor, before: float) -> None:
        self.fine = fine
        self.coarse: Tensor | None = None
        self.unit = unit_for(before)
        self._before = before

    def check(self, name: str, after: float) -> None:
        """Raise ``OverflowError`` if a tensor of the given largest magnitude cannot be added."""
        for when, magnitude in (("before", self._before), ("after", after)):
            if not can_be_summed(magnitude):
                raise OverflowError(
                    f"To be averaged exactly, values must be finite and at most {LARGEST:g} in magnitude; "
                    f"{name!r} has {magnitude:g} {when} local training."
                )

    def is_wide(self, after: float) -> bool:
        """Whether the change to a tensor of the given largest magnitude may need a coarse part."""
        return self._before + after > NARROW * self.unit

    def overflows(self, after: float, dtype: torch.dtype) -> bool:
        """Whether the change may be too large for the tensor's own type, as is possible in half precision."""
        return dtype.is_floating_point and self._before + after > torch.finfo(dtype).max

    def factor(self, weight: float) -> float:
        """The exact factor from changes to weighted changes in fine steps, for a weight in steps."""
        return weight * (FINE / ONE / self.unit)

    def widen(self) -> Tensor:
        """The sum of coarse steps, created at the first call."""
        if self.coarse is None:
            self.coarse = torch.zeros_like(self.fine)
        return self.coarse

    def total(self, dim: int = 0, indices: Tensor | None = None) -> Tensor:
        """The sum in fine steps, or some slices of it; a new tensor."""
        fine, coarse = (
            part if part is None or indices is None else part.index_select(dim, indices)
            for part in (self.fine, self.coarse)
        )
        assert fine is not None
        return torch.add(fine, 0.0 if coarse is None else coarse, alpha=COARSE)


def unit_for(before: float) -> float:
    """The power of two above a tensor's largest magnitude before training, at least 1; 1 if it cannot be summed."""
    return 2.0 ** max(math.frexp(before)[1], 0) if can_be_summed(before) else 1.0


def cut(steps: Tensor) -> Tensor:
    """Return the nearest whole numbers of coarse steps; ``steps``, in fine ones, keeps the rest. Both are exact."""
    coarse = (steps / COARSE).round_()
    steps.sub_(coarse, alpha=COARSE)
    return coarse
