"""Processes that add up their sums, as threads."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lightning_spectral.sums import RunningMean, add_up
from lightning_spectral.testing.trial import Peer

T = TypeVar("T")


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
