"""Sums with noise, to which each client contributes a bounded amount: the Gaussian mechanism on exact sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_spectral.functional.privacy import SLACK
from lightning_spectral.sums.exact_mean import FINE, MESSAGE, NEAR, MeanChange, Peers

Normals = Callable[[int], Tensor]  # that many numbers from a standard normal distribution, float64
FARTHEST = 8.7  # standard deviations: no number of `SecretNormals` is larger
VOTE = 2**31  # a half, in steps of a vote


class PrivateSums:
    r"""The sums of a round, with noise that hides what any one client has contributed to all of them together.

    What client c adds to all sums is one vector, :math:`w \Delta_c`. The sums become

    .. math::
        \sum_c w \Delta_c \min(1, C / \|\Delta_c\|_2) + \mathcal{N}(0, (z w C)^2 I) ,

    so a client moves them by at most w C before noise, whatever it sends. Nothing else in them depends on clients:
    divisors and counts are fixed beforehand (`MeanChange.fix`).

    Args:
        sums: The round's sums, fixed, with nothing in them yet.
        weight: Weight w of every client.
        clip: Bound C on a client's change.
        multiplier: Standard deviation z of the noise, in units of w C.

    Attributes:
        votes: After `release`: a half for each client within the bound, minus a half for each that was shortened.

    Raises:
        OverflowError: If the noise could be too large for an exact sum.

    Reference:
        McMahan et al. (2018), Algorithm 1, with flat clipping and a fixed denominator.
    """

    def __init__(self, sums: Sequence[MeanChange], weight: float, clip: float, multiplier: float) -> None:
        self.sums, self.weight, self.clip, self.multiplier = tuple(sums), weight, clip, multiplier
        self.votes, self._votes = 0.0, torch.zeros(1, dtype=torch.int64)
        self._totals = [(mean, name, steps.long()) for mean in self.sums for name, steps in mean.take()]
        room = min((NEAR * FINE * mean.step(name) for mean, name, _ in self._totals), default=math.inf)
        if FARTHEST * multiplier * clip * weight > room:
            raise OverflowError(
                f"Noise of {multiplier:g} times a clip of {clip:g} is too large for an exact sum; lower one of them."
            )

    @torch.no_grad()
    def take(self) -> None:
        """Take what one client has added out of the sums, shortened to the bound."""
        added = [steps for mean in self.sums for _, steps in mean.take()]
        norms = [steps.norm() * mean.step(name) for steps, (mean, name, _) in zip(added, self._totals, strict=True)]
        norm, limit = float(torch.stack(norms).norm()) if norms else 0.0, self.clip * self.weight * SLACK
        self._votes += VOTE if norm <= limit else -VOTE
        for steps, (_, _, total) in zip(added, self._totals, strict=True):
            total.add_(steps.mul_(limit / norm).trunc_().long() if norm > limit else steps.long())

    @torch.no_grad()
    def release(self, processes: Peers | None = None, normals: Normals | None = None, vote_noise: float = 0.0) -> None:
        """Put what was taken back into the sums, of all processes together, and with noise.

        All ``processes`` call this together. The noise comes from the ``normals`` of one of them, and the noise of
        `votes` has the standard deviation ``vote_noise``.
        """
        parts = [(mean.step(n), part) for mean, n, own in self._totals for part in torch.split(own.view(-1), MESSAGE)]
        if normals is not None:
            for step, part in parts:
                noise = normals(len(part)).mul_(self.multiplier * self.clip * self.weight / step)
                part.add_(noise.round_().long().to(part.device))
            self._votes += round(float(normals(1)) * vote_noise * 2 * VOTE)
        if processes is not None:
            self._votes = self._votes.to(parts[0][1].device) if parts else self._votes
            processes.add_up([self._votes, *(part for _, part in parts)])
        for mean, name, total in self._totals:
            mean.put(name, total)
        self.votes = int(self._votes) / (2 * VOTE)
