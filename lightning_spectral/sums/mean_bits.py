"""The mean of bits over clients, from counts that are exact in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_spectral.sums.exact_sum import ExactSum
from lightning_spectral.sums.weights import Weights


class MeanBits:
    """Weighted mean over clients of vectors of bits.

    Weights are whole numbers of steps (`Weights`) that sum to less than 2^53, so their sums in float64 are exact.

    Args:
        num_bits: Length n of the vectors.
        total_weight: Sum of the weights of all clients asked.
        device: Where the counts are kept.

    Raises:
        ValueError: If the total is negative or not finite.

    Example:
        >>> mean = MeanBits(2, total_weight=4)
        >>> mean.add(torch.tensor([True, False]), weight=1)
        >>> mean.add(torch.tensor([True, True]), weight=3)
        >>> mean.finish().tolist()
        [1.0, 0.75]
    """

    def __init__(self, num_bits: int, total_weight: float, device: torch.device | str = "cpu") -> None:
        self.weights = Weights(total_weight)
        self.ones = torch.zeros(num_bits, dtype=torch.float64, device=device)

    @property
    def sums(self) -> list[ExactSum]:
        """Empty, because nothing is rounded."""
        return []

    @property
    def totals(self) -> list[Tensor]:
        """For each bit, the weight of the clients in which it is 1, in steps."""
        return [self.ones]

    def add(self, bits: Tensor, weight: float) -> None:
        """Add one client's bits, booleans of shape ``(n,)``, with its weight.

        Raises:
            ValueError: If they have the wrong length, or weights are negative or sum to more than their total.
        """
        if bits.shape != self.ones.shape:
            raise ValueError(f"Bits of shape {tuple(self.ones.shape)} are averaged, got {tuple(bits.shape)}.")
        self.ones.add_(bits, alpha=float(self.weights.add(weight)))

    def finish(self, prior: float = 0.0) -> Tensor:
        r"""The mean of the bits, or its posterior mean.

        Args:
            prior: Pseudo-count :math:`\lambda` of a symmetric Beta prior: with K clients the mean is
                :math:`(K \bar z + \lambda) / (K + 2 \lambda)`, which is never 0 or 1.

        Returns:
            Shape ``(n,)``, float64.
        """
        mean = self.ones / max(self.weights.sum, 1)
        clients = self.weights.num_terms
        return mean if prior == 0.0 else (clients * mean + prior) / (clients + 2 * prior)
