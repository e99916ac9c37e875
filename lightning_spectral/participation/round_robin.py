"""Models take turns on every processor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_spectral.participation.sampler import Sampler
from lightning_spectral.participation.uniform_sampler import uniform_probs

__all__ = ["RoundRobin"]


@dataclass(frozen=True)
class RoundRobin(Sampler):
    """Every processor is equally likely to be active; the model it then trains rotates.

    In round t, processor p trains model number (p + t) mod c of the c models that it can train.

    Args:
        active: Expected number m of active processors in a round, above zero.
        design: Fixed-size design, see :class:`Sampler`. As all processors are equally likely, the choice makes no
            difference.
        normalize: Whether to divide by the sum of coefficients, see :class:`Sampler`.

    Note:
        Coefficients are divided by the probability over many rounds, which is that of :class:`Uniform`. At fixed
        weights, the average over a cycle (as many rounds as the least common multiple of all c) is therefore unbiased.
        A single round is not: clients whose turn it is not are missing from a model, whoever is drawn. Variance figures
        computed from the assignment's probabilities are those of :class:`Uniform`.

    Reference:
        Bhuyan, Moharir & Joshi (2022), "Multi-Model Federated Learning with Provable Guarantees".

    Example:
        >>> sampler, everything = RoundRobin(active=1), torch.ones(2, 2)
        >>> sampler.probs(everything, round_idx=0)
        tensor([[0.5000, 0.0000],
                [0.0000, 0.5000]], dtype=torch.float64)
        >>> sampler.probs(everything, round_idx=1)
        tensor([[0.0000, 0.5000],
                [0.5000, 0.0000]], dtype=torch.float64)
    """

    def probs(self, scores: Tensor, round_idx: int = 0) -> Tensor:
        """Probability ``active / P_able`` of every able processor to train the model whose turn it is."""
        can = scores > 0
        counts = can.sum(1, keepdim=True)
        turn = (torch.arange(len(can))[:, None] + round_idx) % counts.clamp(min=1)
        on_turn = can & (can.cumsum(1) - 1 == turn)
        return uniform_probs(on_turn, self.active)

    def long_run_probs(self, scores: Tensor, probs: Tensor) -> Tensor:
        """Probabilities over a cycle: every model that a processor can train has the same share of rounds."""
        return uniform_probs(scores > 0, self.active)
