"""What the training losses of the first rounds show: a run that explodes, and one that does not learn."""

from __future__ import annotations

import math
from statistics import fmean

from lightning_spectral.algorithms.base import ServerHalf
from lightning_spectral.algorithms.capabilities import RemediesFlatLosses, RemediesLargeUpdates

ROUNDS_OF_EXPLOSIONS = 20
LARGEST_GROWTH = 3.0  # of the loss, relative to the first round
LEAST_LOSS = 1e-2  # below this, and for negative losses, the ratio of two losses says little
EARLY, LATE = slice(5, 10), slice(25, 30)  # rounds whose mean losses are compared
FLAT = 0.9  # of the early loss
HALF = 0.5  # of the first loss: a run that has come below has learned, and may be done
CLIP = "clip gradients with `local_hooks=[GradientClip(...)]`"


class Losses:
    """The losses of the first rounds of one fit, of which the user is told at most one thing."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._begin = 0
        self._has_exploded = False

    def note(self, half: ServerHalf, loss: float, round_idx: int) -> str:
        """Record a round. Return what the user should be told of it; mostly nothing.

        Args:
            half: The server's half, which knows the remedies of its algorithm.
            loss: The mean training loss; NaN if nobody trained.
            round_idx: The index of the round.
        """
        if self._has_exploded or round_idx >= LATE.stop or not (self._losses or math.isfinite(loss)):
            return ""
        if not self._losses:
            self._begin = round_idx
        self._losses.append(loss)
        first = self._losses[0]
        if round_idx < ROUNDS_OF_EXPLOSIONS and has_exploded(loss, first):
            self._has_exploded = True
            return _explosion(loss, self._begin, first, smaller_updates(half))
        remedy = half.remedy_for_flat_losses if isinstance(half, RemediesFlatLosses) else ""
        return _plateau(self._losses, remedy) if remedy and stays_flat(self._losses) else ""


def has_exploded(loss: float, first: float) -> bool:
    """Whether a loss is finite and far above the first one; never true if the first was negative or nearly zero.

    Example:
        >>> has_exploded(9.0, 2.0), has_exploded(5.0, 2.0), has_exploded(5.0, -2.0), has_exploded(float("nan"), 2.0)
        (True, False, False, False)
    """
    return first >= LEAST_LOSS and LARGEST_GROWTH * first < loss < math.inf


def stays_flat(losses: list[float]) -> bool:
    """Whether the losses of the first 30 rounds have hardly fallen since the first few, and are far from zero.

    The first few do not count: clients soon fit their few labels within a round, though the network learns nothing.

    Example:
        >>> stays_flat([2.3] * 30), stays_flat([2.3] * 10 + [1.9] * 20), stays_flat([2.3] + [0.4] * 29)
        (True, False, False)
    """
    if len(losses) != LATE.stop or losses[0] < LEAST_LOSS:
        return False
    return fmean(losses[LATE]) > max(FLAT * fmean(losses[EARLY]), HALF * losses[0])


def smaller_updates(half: ServerHalf) -> str:
    """What the user can do about updates that are too large, as a sentence without its full stop.

    Example:
        >>> from torch import nn
        >>> from lightning_spectral.algorithms import FedAvg
        >>> smaller_updates(FedAvg().bind(nn.Linear(1, 1)))
        'Lower the learning rate, or clip gradients with `local_hooks=[GradientClip(...)]`'
    """
    own = half.remedy_for_large_updates if isinstance(half, RemediesLargeUpdates) else ""
    return f"Lower the learning rate, {CLIP}, or {own}" if own else f"Lower the learning rate, or {CLIP}"


def _explosion(loss: float, first_round: int, first: float, remedies: str) -> str:
    return (
        f"the training loss is {loss:.3g}, {loss / first:.3g} times that of round {first_round} ({first:.3g}). "
        f"{remedies}. Where rounds have few clients whose data differ much, look at the validation loss first."
    )


def _plateau(losses: list[float], remedy: str) -> str:
    early, late = fmean(losses[EARLY]), fmean(losses[LATE])
    return (
        f"the training loss has hardly fallen since rounds {EARLY.start} to {EARLY.stop - 1}: {late:.3g} now, "
        f"{early:.3g} then. If the validation metrics do not improve either, {remedy}."
    )
