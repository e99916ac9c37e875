"""What the training losses of the first rounds show: a run that explodes, and one that does not learn."""

from __future__ import annotations

import math
from statistics import fmean

from lightning_spectral.algorithms.base import Moment, ServerHalf

ROUNDS_OF_EXPLOSIONS = 20
LARGEST_GROWTH = 3.0  # of the loss, relative to the first round
LEAST_LOSS = 1e-2  # below this, and for negative losses, the ratio of two losses says little
EARLY, LATE = range(5, 10), range(25, 30)  # rounds whose mean losses are compared
FLAT = 0.9  # of the early loss
HALF = 0.5  # of the first loss: below it a run has learned, and may have converged
CLIP = "clip gradients with `local_hooks=[GradientClip(...)]`"


class Losses:
    """Watches the losses of the first rounds of one fit; warns at most once.

    Attributes:
        is_over: Whether nothing more is to be noted.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._losses: dict[int, float] = {}  # the finite ones by round

    def note(self, half: ServerHalf, loss: float, round_idx: int) -> str:
        """Record a round, and return a warning for the user; mostly empty.

        Args:
            half: The server's half, which knows the remedies of its algorithm.
            loss: The mean training loss; NaN if nobody trained.
            round_idx: The index of the round.
        """
        if round_idx < LATE.stop and math.isfinite(loss):
            self._losses[round_idx] = loss
            begin, first = next(iter(self._losses.items()))
            if round_idx < ROUNDS_OF_EXPLOSIONS and has_exploded(loss, first):
                self.is_over = True
                return _explosion(loss, begin, first, smaller_updates(half))
        self.is_over = round_idx >= LATE[-1]
        return self._plateau(half) if self.is_over else ""

    def _plateau(self, half: ServerHalf) -> str:
        remedy = ", or ".join(half.advice(Moment.FLAT_LOSSES))
        first, early, late = next(iter(self._losses.values()), math.nan), self._mean(EARLY), self._mean(LATE)
        if not remedy or not stays_flat(first, early, late):
            return ""
        return (
            f"the training loss has hardly fallen since rounds {EARLY[0]} to {EARLY[-1]}: {late:.3g} now, {early:.3g} "
            f"then. If the validation metrics do not improve either, {remedy}."
        )

    def _mean(self, rounds: range) -> float:
        """The mean loss of some rounds; NaN if nobody trained in any of them."""
        found = [self._losses[round_idx] for round_idx in rounds if round_idx in self._losses]
        return fmean(found) if found else math.nan


def has_exploded(loss: float, first: float) -> bool:
    """Whether a loss is finite and far above the first one; never true if the first was negative or nearly zero.

    Example:
        >>> has_exploded(9.0, 2.0), has_exploded(5.0, 2.0), has_exploded(5.0, -2.0), has_exploded(float("nan"), 2.0)
        (True, False, False, False)
    """
    return first >= LEAST_LOSS and LARGEST_GROWTH * first < loss < math.inf


def stays_flat(first: float, early: float, late: float) -> bool:
    """Whether losses have hardly fallen since the first few rounds; never true if one of them is unknown.

    The first few rounds do not count: in them clients learn to predict their few labels, even if the network learns
    nothing else.

    Args:
        first: Loss of the first round.
        early: Mean of a few rounds soon after; NaN for none, as in a run that was resumed later.
        late: Mean of a few rounds at the end.

    Example:
        >>> stays_flat(2.3, 2.3, 2.3), stays_flat(2.3, 0.4, 0.4), stays_flat(2.3, float("nan"), 2.3)
        (True, False, False)
    """
    return first >= LEAST_LOSS and max(FLAT * early, HALF * first) < late <= LARGEST_GROWTH * early


def smaller_updates(half: ServerHalf) -> str:
    """What the user can do about updates that are too large, as a sentence without its full stop.

    Example:
        >>> from torch import nn
        >>> from lightning_spectral.algorithms import FedAvg
        >>> smaller_updates(FedAvg().bind(nn.Linear(1, 1)))
        'Lower the learning rate, or clip gradients with `local_hooks=[GradientClip(...)]`'
    """
    *first, last = ["Lower the learning rate", CLIP, *half.advice(Moment.LARGE_UPDATES)]
    return f"{', '.join(first)}, or {last}"


def _explosion(loss: float, first_round: int, first: float, remedies: str) -> str:
    return (
        f"the training loss is {loss:.3g}, {loss / first:.3g} times that of round {first_round} ({first:.3g}). "
        f"{remedies}. Where rounds have few clients whose data differ much, look at the validation loss first."
    )
