"""What exact sums over clients are made of: their weights in whole steps, and the grid of their changes."""

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


def check_can_be_summed(name: str, before: float, after: float) -> None:
    """Raise ``OverflowError`` if a tensor of the given largest magnitudes cannot be added."""
    for when, magnitude in (("before", before), ("after", after)):
        if not can_be_summed(magnitude):
            raise OverflowError(
                f"To be averaged exactly, values must be finite and at most {LARGEST:g} in magnitude; "
                f"{name!r} has {magnitude:g} {when} local training."
            )


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


FINE = 2.0**50  # steps in one unit
NEAR = 2.0**12  # units up to which a change is added in one part
COARSE_BITS = 40  # a coarse step is 2^40 steps


def unit_for(before: float) -> float:
    """The power of two above a tensor's largest magnitude before training, at least 1; 1 if it cannot be summed."""
    return 2.0 ** max(math.frexp(before)[1], 0) if can_be_summed(before) else 1.0


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
