"""Every processor is equally likely to be active, and then trains any model it can."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.participation.sampler import Sampler

__all__ = ["Uniform", "uniform_probs"]


@dataclass(frozen=True)
class Uniform(Sampler):
    """Every processor that can train something is equally likely to be active, with any of the models it can train.

    With a design, one model and one processor per client, it draws the same cohort as
    :class:`~lightning_spectral.participation.UniformParticipation`; with ``normalize``, its coefficients are the
    numbers of examples too.

    Args:
        active: Expected number m of active processors in a round, above zero.
        design: Fixed-size design, see :class:`Sampler`. As all processors are equally likely, the choice makes no
            difference.
        normalize: Whether to divide by the sum of coefficients, see :class:`Sampler`.

    Reference:
        The baseline "Random" of Zhang et al. (2024).

    Example:
        >>> Uniform(active=1).probs(torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        tensor([[0.2500, 0.2500],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        """Probability ``active / P_able`` of every able processor, shared among its models; the same in all rounds."""
        return uniform_probs(scores > 0, self.active)


def uniform_probs(can: Tensor, active: float) -> Tensor:
    """Equal row sums, shared equally among the models that a processor can train.

    Args:
        can: Which processor can train which model, bool, shape ``(P, S)``.
        active: Sum m of all probabilities, at most the number of processors that can train something; larger values
            count as that number.

    Returns:
        Probabilities, float64, shape ``(P, S)``.
    """
    counts = can.sum(1, keepdim=True)
    chance = min(1.0, active / max(int((counts > 0).sum()), 1))
    return torch.where(can, chance / counts.clamp(min=1).double(), 0.0)
