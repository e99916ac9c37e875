"""A sum whose bits do not depend on the order of its terms or on which process added them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_spectral.sums.magnitudes import LARGEST, can_be_summed
from lightning_spectral.sums.weights import ONE

FINE = 2.0**50  # fine steps in one unit
COARSE = 2.0**39  # fine steps in one coarse step
NARROW = 4.0  # units up to which a change has no coarse part


class ExactSum:
    r"""Sum of weighted changes of one tensor, bit for bit the same in any order and over any processes.

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

    Args:
        fine: Zeros that become the sum of fine steps, float64.
        before: The tensor's largest magnitude before training.

    Attributes:
        fine: Sum of fine steps.
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
    """The power of two above a tensor's largest magnitude before training, at least 1; 1 if it cannot be summed.

    Example:
        >>> [unit_for(magnitude) for magnitude in (0.0, 0.3, 1.0, 5.0)]
        [1.0, 1.0, 2.0, 8.0]
    """
    return 2.0 ** max(math.frexp(before)[1], 0) if can_be_summed(before) else 1.0


def cut(steps: Tensor) -> Tensor:
    """Return the nearest whole numbers of coarse steps; ``steps``, in fine ones, keeps the rest. Both are exact."""
    coarse = (steps / COARSE).round_()
    steps.sub_(coarse, alpha=COARSE)
    return coarse
