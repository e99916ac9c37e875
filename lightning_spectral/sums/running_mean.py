"""A mean that grows client by client: what all have in common, and the mean of bits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_spectral.sums.exact_sum import Weights

T = TypeVar("T")
_MESSAGE = 2**22  # values that are added up at a time


class Peers(Protocol):
    """The processes that train the same round; all of them call these methods together."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def gather(self, value: T) -> list[T]:
        """Gather one value from every process, in the order of their ranks."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace int64 tensors by their sums over processes, in place."""


class RunningMean(Protocol):
    """A weighted mean that is summed over clients, one by one, and then over processes."""

    @property
    def weights(self) -> Weights:
        """The clients' weights so far."""

    @property
    def coarse(self) -> Collection[str]:
        """Names of the tensors that have a sum of coarse steps, which processes may lack."""

    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        """All other sums, int64, contiguous, and those of coarse steps of the named tensors."""


def add_up(processes: Peers, means: Sequence[RunningMean]) -> None:
    """Give every process the sums over all processes; what `Weights.count` refuses fails in all of them."""
    if processes.size == 1:
        return
    mine = [(mean.weights.sum, mean.weights.num_terms, set(mean.coarse)) for mean in means]
    totals = []
    for mean, gathered in zip(means, zip(*processes.gather(mine), strict=True), strict=True):
        steps, num_terms, coarse = zip(*gathered, strict=True)
        mean.weights.count(sum(steps) - mean.weights.sum, sum(num_terms) - mean.weights.num_terms)
        totals += mean.totals(set().union(*coarse))
    processes.add_up([message for total in totals for message in torch.split(total.view(-1), _MESSAGE)])


class MeanBits:
    """Weighted mean over clients of vectors of n bits, whose counts are kept on a device.

    Weights are whole numbers of steps (`Weights`), so sums of them are exact.

    Example:
        >>> mean = MeanBits(2, total_weight=4)
        >>> mean.add(torch.tensor([True, False]), weight=1)
        >>> mean.add(torch.tensor([True, True]), weight=3)
        >>> mean.finish().tolist()
        [1.0, 0.75]
    """

    def __init__(self, num_bits: int, total_weight: float, device: torch.device | str = "cpu") -> None:
        self.weights = Weights(total_weight)
        self.ones = torch.zeros(num_bits, dtype=torch.int64, device=device)

    @property
    def coarse(self) -> Collection[str]:
        """Empty."""
        return ()

    def totals(self, coarse: Collection[str]) -> list[Tensor]:
        """For each bit, the weight of the clients in which it is 1, in steps."""
        return [self.ones]

    def add(self, bits: Tensor, weight: float) -> None:
        """Add one client's bits, booleans of shape ``(n,)``, with its weight; errors as for `Weights.add`."""
        if bits.shape != self.ones.shape:
            raise ValueError(f"Bits of shape {tuple(self.ones.shape)} are averaged, got {tuple(bits.shape)}.")
        self.ones.add_(bits, alpha=self.weights.add(weight))

    def finish(self, prior: float = 0.0) -> Tensor:
        r"""The mean of the bits, shape ``(n,)``, float64, or its posterior mean.

        ``prior`` is the pseudo-count :math:`\lambda` of a symmetric Beta prior: with K clients the mean is
        :math:`(K \bar z + \lambda) / (K + 2 \lambda)`, which is never 0 or 1.
        """
        mean = self.ones.double() / max(self.weights.sum, 1)
        clients = self.weights.num_terms
        return mean if prior == 0.0 else (clients * mean + prior) / (clients + 2 * prior)
