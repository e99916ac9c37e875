"""Processes that meet, as threads."""

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lightning_spectral.sums import RunningMean, add_up
from lightning_spectral.testing.trial import Peer

T = TypeVar("T")
R = TypeVar("R")


def together(groups: Sequence[T], work: Callable[[T, Peer], R]) -> list[R]:
    """Each group in its own process, which may meet the others."""
    board: list[object] = [None] * len(groups)
    barrier = threading.Barrier(len(groups), timeout=30)
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda rank: work(groups[rank], Peer(rank, board, barrier)), range(len(groups))))


def in_processes(groups: Sequence[T], work: Callable[[T], RunningMean]) -> list[RunningMean]:
    """Each group in its own process; afterwards every process has the sums of all."""

    def run(group: T, peer: Peer) -> RunningMean:
        add_up(peer, [mean := work(group)])
        return mean

    return together(groups, run)


def merge(mine: RunningMean, theirs: RunningMean) -> None:
    """Add the sums of another process to those of the first."""
    in_processes([mine, copy.deepcopy(theirs)], lambda mean: mean)
