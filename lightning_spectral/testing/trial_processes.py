"""A round of two processes, without processes: their sums are added up in two threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.testing.trial import Trial

T = TypeVar("T")


def play_in_two_processes(mine: Trial, theirs: Trial, groups: Sequence[Sequence[WorkUnit]]) -> None:
    """Play a round of which two processes train a part each, and add up their sums."""
    trials = mine, theirs
    for trial, group in zip(trials, groups, strict=True):
        trial.open()
        trial.share(group)
    board: list[Any] = [None, None]
    barrier = threading.Barrier(2, timeout=60)
    peers = [_Peer(rank, board, barrier) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda peer: trials[peer.rank].engine.round.add_up(peer), peers))
    outcomes = [outcome for trial in trials for outcome in trial.engine.round.outcomes]
    written = [trial.store.written() for trial in trials]
    for rank, trial in enumerate(trials):
        trial.store.merge(written[1 - rank])
        trial.engine.round.outcomes = list(outcomes)
        trial.close()


class _Peer:
    """One of two processes, in a thread."""

    size = 2

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self._board, self._barrier = rank, board, barrier

    def gather(self, value: T) -> list[T]:
        self._board[self.rank] = value
        self._barrier.wait()
        said = list(self._board)
        self._barrier.wait()
        return said

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        said = self.gather([tensor.clone() for tensor in tensors])
        for tensor, *parts in zip(tensors, *said, strict=True):
            tensor.copy_(parts[0] + parts[1])
