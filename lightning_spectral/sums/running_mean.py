"""Adds up the sums of several processes exactly, so that it does not matter which of them trained a client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lightning_spectral.sums.exact_sum import ExactSum
from lightning_spectral.sums.weights import Weights

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
    """Give every process the sums over all processes.

    Raises:
        OverflowError: In every process, if there are too many clients.
        ValueError: In every process, if their weights sum to more than the total.
    """
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
