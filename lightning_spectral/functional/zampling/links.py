"""Maps from scores to probabilities and back, and gradients through the draw of a bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.arguments import Number, check_fields, flag


class Link(ABC):
    """Maps scores s, which an optimizer may move anywhere, to probabilities p in [0, 1]."""

    @abstractmethod
    def probs(self, scores: Tensor) -> Tensor:
        """Probabilities p = f(s)."""

    @abstractmethod
    def scores(self, probs: Tensor) -> Tensor:
        """Scores that have the given probabilities."""

    @abstractmethod
    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        """The gradient of the scores at which bits were drawn, from that of the loss for the bits, Q^T grad_w."""


@dataclass(frozen=True)
class Clip(Link):
    r"""The link of Zampling: :math:`f(s) = \min(\max(s, 0), 1)`, with the straight-through gradient within (0, 1).

    Args:
        absorbing: Whether a score at or beyond 0 or 1 has no gradient, as published; it then stays there for the rest
            of a client's turn, and from round to round. With ``False``, gradients that point back inside are kept.

    Reference:
        Villani, Natale & Mallmann-Trenn, section 1.3.

    Example:
        >>> scores, downhill = torch.tensor([-0.5, 0.3, 1.0]), torch.tensor([-1.0, -1.0, -1.0])
        >>> Clip().gradient(scores, downhill)
        tensor([-0., -1., -0.])
        >>> Clip(absorbing=False).gradient(scores, downhill)
        tensor([-1., -1., -0.])
    """

    absorbing: bool = True

    def __post_init__(self) -> None:
        check_fields(self, absorbing=flag)

    def probs(self, scores: Tensor) -> Tensor:
        return scores.clamp(0.0, 1.0)

    def scores(self, probs: Tensor) -> Tensor:
        return probs.clone()

    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        if self.absorbing:
            return of_bits * ((scores > 0) & (scores < 1))
        outwards = ((scores <= 0) & (of_bits > 0)) | ((scores >= 1) & (of_bits < 0))
        return of_bits * ~outwards


@dataclass(frozen=True)
class Sigmoid(Link):
    r"""The link of the supermasks of Zhou et al. and of FedPM: :math:`f(s) = 1 / (1 + e^{-s})`.

    Args:
        straight_through: Whether p gets the same gradient as the bit. ``False`` gives the gradient of FedPM's code,
            which is p times as large.
        margin: Probabilities are kept this far from 0 and 1 when converted to scores, so that the scores are finite.

    Reference:
        Zhou et al. (2019), Deconstructing lottery tickets; Isik et al. (2023), FedPM, whose code has a margin of 0.01.

    Example:
        >>> Sigmoid().probs(Sigmoid().scores(torch.tensor([0.0, 0.5, 1.0])))
        tensor([0.0100, 0.5000, 0.9900])
    """

    straight_through: bool = True
    margin: float = 0.01

    def __post_init__(self) -> None:
        margin = Number(above=0, below=0.5, hint="the score of a probability of 0 or 1 is infinite")
        check_fields(self, straight_through=flag, margin=margin)

    def probs(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores)

    def scores(self, probs: Tensor) -> Tensor:
        return torch.logit(probs, eps=self.margin)

    def gradient(self, scores: Tensor, of_bits: Tensor) -> Tensor:
        p = torch.sigmoid(scores)
        slope = p * (1 - p)
        return of_bits * (slope if self.straight_through else slope * p)
