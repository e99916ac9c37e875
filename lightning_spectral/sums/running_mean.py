"""A mean that grows client by client: what all have in common, and the mean of bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_spectral.sums.exact_sum import ExactSum, Weights

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
        """Replace float64 tensors by their sums over processes, in place."""


class RunningMean(Protocol):
    """A weighted mean that is summed over clients, one by one, and then over processes."""

    @property
    def weights(self) -> Weights:
        """The clients' weights so far."""

    @property
    def sums(self) -> list[ExactSum]:
        """Sums of weighted changes, whose coarse parts may be missing."""

    @property
    def totals(self) -> list[Tensor]:
        """All other sums, float64; every process has them."""


def add_up(processes: Peers, means: Sequence[RunningMean]) -> None:
    """Give every process the sums over all processes; what `Weights.count` refuses fails in all of them."""
    if processes.size == 1:
        return
    mine = [(m.weights.sum, m.weights.num_terms, [s.coarse is not None for s in m.sums]) for m in means]
    for mean, gathered in zip(means, zip(*processes.gather(mine), strict=True), strict=True):
        steps, num_terms, has_coarse = zip(*gathered, strict=True)
        mean.weights.count(sum(steps) - mean.weights.sum, sum(num_terms) - mean.weights.num_terms)
        for total, needed in zip(mean.sums, zip(*has_coarse, strict=True), strict=True):
            if any(needed):
                total.widen()
    processes.add_up([message for mean in means for message in _messages(mean)])


def _messages(mean: RunningMean) -> Iterator[Tensor]:
    coarse = [total.coarse for total in mean.sums if total.coarse is not None]
    for tensor in (*mean.totals, *coarse):
        yield from torch.split(tensor.view(-1), _MESSAGE)


class MeanBits:
    """Weighted mean over clients of vectors of n bits, whose counts are kept on a device.

    Weights are whole numbers of steps (`Weights`) that sum to less than 2^53, so their sums in float64 are exact.

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
        """Add one client's bits, booleans of shape ``(n,)``, with its weight; errors as for `Weights.add`."""
        if bits.shape != self.ones.shape:
            raise ValueError(f"Bits of shape {tuple(self.ones.shape)} are averaged, got {tuple(bits.shape)}.")
        self.ones.add_(bits, alpha=float(self.weights.add(weight)))

    def finish(self, prior: float = 0.0) -> Tensor:
        r"""The mean of the bits, shape ``(n,)``, float64, or its posterior mean.

        ``prior`` is the pseudo-count :math:`\lambda` of a symmetric Beta prior: with K clients the mean is
        :math:`(K \bar z + \lambda) / (K + 2 \lambda)`, which is never 0 or 1.
        """
        mean = self.ones / max(self.weights.sum, 1)
        clients = self.weights.num_terms
        return mean if prior == 0.0 else (clients * mean + prior) / (clients + 2 * prior)
