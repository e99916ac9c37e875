"""The clients' weights in one round's average, as whole numbers of steps, whose sums do not depend on the order."""

from __future__ import annotations

import math

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

    Raises:
        ValueError: If the total is negative or not finite.

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
