"""Processes that add up their sums, as threads."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import Tensor

from lightning_spectral.sums import RunningMean, add_up
from lightning_spectral.sums.exact_mean import Peers

T = TypeVar("T")


class Peer(Peers):
    """One of several processes, in a thread."""

    def __init__(self, rank: int, board: list[object], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, len(board), board, barrier

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait()
        said = list(self._board)
        self._barrier.wait()
        return said  # type: ignore[return-value]

    def add_up(self, tensors: list[Tensor]) -> None:
        said = self.gather([tensor.clone() for tensor in tensors])
        for tensor, parts in zip(tensors, zip(*said, strict=True), strict=True):
            tensor.copy_(sum(parts))


def in_processes(groups: Sequence[T], work: Callable[[T], RunningMean]) -> list[RunningMean]:
    """Each group in its own process; afterwards every process has the sums of all."""
    board: list[object] = [None] * len(groups)
    barrier = threading.Barrier(len(groups), timeout=30)

    def run(rank: int) -> RunningMean:
        mean = work(groups[rank])
        add_up(Peer(rank, board, barrier), [mean])
        return mean

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(run, range(len(groups))))


def merge(mine: RunningMean, theirs: RunningMean) -> None:
    """Add the sums of another process to those of the first."""
    in_processes([mine, copy.deepcopy(theirs)], lambda mean: mean)
