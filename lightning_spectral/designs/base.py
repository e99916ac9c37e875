"""The contract of a design: exact fixed-size draws with given inclusion probabilities."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor


class FittedDesign(ABC):
    """A design prepared for one vector of inclusion probabilities; draws are cheap and can be repeated."""

    @abstractmethod
    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw independent samples of terms, e.g. one for each client; ``generator`` is the only source of randomness.

        Returns:
            Term indices, sorted and distinct in each row, int64, shape ``(num_samples, n)``, on the generator's device.
        """


class Prepared(FittedDesign):
    """A function that draws, ``function(*prepared, num_samples, generator)``, with what was prepared for it."""

    def __init__(self, function: Callable[..., Tensor], *prepared: Any, **options: Any) -> None:
        self._draw = partial(function, *prepared, **options)

    def draw(self, num_samples: int, generator: torch.Generator) -> Tensor:
        return self._draw(num_samples, generator)


class Design(ABC):
    """A way to draw exactly n of N terms so that term i is drawn with probability ``inclusion_probs[i]``.

    Subclasses implement :meth:`fit`. ``lightning_spectral.testing.check_design(MyDesign())`` then checks the contract:
    size exactly n, terms of probability one always drawn and those of zero never, the given frequencies, independent
    rows.

    Attributes:
        draws_cohort: Whether the rows of one draw belong together, one for each client of a group. Such a design draws
            once per group and round; all others draw once per client.
    """

    draws_cohort: ClassVar[bool] = False

    @abstractmethod
    def fit(self, inclusion_probs: Tensor) -> FittedDesign:
        """Do the work that is common to all draws; in a federation it serves every client with these probabilities.

        Args:
            inclusion_probs: Shape ``(N,)``, in ``[0, 1]``, summing to an integer n within 1e-6 n. Our designs take
                entries within 1e-13 of 0 or 1 for 0 or 1; `SuccessiveSampling` those within 1e-11 of 1 for 1.

        Raises:
            ValueError: If ``inclusion_probs`` is invalid; ``functional.checks.as_inclusion_probs`` makes that check.
        """

    def fit_all(self, inclusion_probs: Sequence[Tensor]) -> list[FittedDesign]:
        """Fit several vectors, such as those of all layers; by default one after another."""
        return [self.fit(probs) for probs in inclusion_probs]

    def multipliers(self, inclusion_probs: Tensor, multipliers: Tensor, cohort_size: int) -> Tensor:
        """Return the multipliers, shape ``(N,)``, for draws of this design; by default the strategy's.

        Those suit independent draws. ``cohort_size`` is the number of clients of the group.
        """
        return multipliers

    def sample(self, inclusion_probs: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
        """Fit and draw in one call."""
        return self.fit(inclusion_probs).draw(num_samples, generator)


class JointDesign(Design):
    """A design that also knows how likely two terms are to be drawn together."""

    @abstractmethod
    def joint_inclusion_probs(self, inclusion_probs: Tensor) -> Tensor:
        """Probabilities that terms i and j are in the same sample, shape ``(N, N)``, float64, symmetric.

        The inclusion probabilities, as for :meth:`fit`, are on the diagonal; each row sums to n times its diagonal
        entry.
        """
