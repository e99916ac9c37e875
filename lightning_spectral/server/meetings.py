"""Meetings of the processes of a run, which tell which process is missing because it has ended or hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist

from lightning_spectral.errors import LostProcessError


class Meetings:
    """Counts the meetings of this process in the store through which the processes found each other.

    There the others can read the count. All processes meet in the same order, so one with a lower count is missing.

    Args:
        rank: Rank of this process, from 0.
        size: Number of processes.

    Attributes:
        turns: What each process is doing until the next meeting, by rank.
        is_broken: Whether a process did not arrive; there are no more meetings then.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.turns: Mapping[int, str] = {}
        self.is_broken = False
        self._count = -1
        self._arrive()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Enclose what all processes do together.

        Raises:
            LostProcessError: If a process does not arrive. If all have arrived, the block's own error is raised.
        """
        try:
            self._arrive()
            yield
        except RuntimeError as error:  # from torch.distributed: a closed connection, or a timeout
            missing, is_sure = self._missing()
            if not missing:
                raise
            self.is_broken = True
            raise LostProcessError(_explanation(missing, is_sure, self.turns, error)) from error

    def _arrive(self) -> None:
        self._count += 1
        _store().set(_key(self.rank), str(self._count))

    def _missing(self) -> tuple[list[int], bool]:
        """The missing ranks, and whether that is certain: process 0 may have ended, and its store with it."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            return [rank for rank in others if self._count_of(rank) < self._count], True
        except RuntimeError:
            return others, self.size == 2

    def _count_of(self, rank: int) -> int:
        store = _store()
        return int(store.get(_key(rank))) if store.check([_key(rank)]) else -1


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"lightning_spectral/meetings of process {rank}"


def _explanation(missing: Sequence[int], is_sure: bool, turns: Mapping[int, str], error: Exception) -> str:
    """What has happened and how to continue; the last line is torch's message.

    Example:
        >>> print(_explanation([1], True, {1: "round 3, client 7"}, RuntimeError("Connection closed by peer")))
        Process 1 (round 3, client 7) did not come to a meeting of the processes: it has ended, and its own output says
        why, or it hangs, or it needs longer than the `timeout` of ClientParallelStrategy. ...
        Connection closed by peer
    """
    named = ", ".join(f"{rank} ({turns[rank]})" if rank in turns else str(rank) for rank in missing)
    who = f"Process {named} did not come to a meeting of the processes: it"
    if not is_sure:
        who = f"One of the processes {named} did not come to a meeting, and process 0, which knows who, is gone: it"
    elif len(missing) > 1:
        who = f"Processes {named} did not come to a meeting of the processes: one of them"
    return (
        f"{who} has ended, and its own output says why, or it hangs, or it needs longer than the `timeout` of "
        "ClientParallelStrategy. End what is left, and start all processes again: with "
        f"fit(..., ckpt_path=latest_checkpoint(folder)) the run goes on from its last saved round.\n{error}"
    )
