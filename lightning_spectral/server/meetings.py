"""Meetings of the processes of a run, which tell which process is missing because it has ended or hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import distributed as dist

from lightning_spectral.errors import LostProcessError

T = TypeVar("T")
PATIENCE = 5.0  # seconds to wait for the store, or for processes that have just been disconnected


class Meetings:
    """Counts the meetings of this process in the store through which the processes found each other.

    There the others can read the count: one when a process arrives, and one more when it leaves. All processes meet in
    the same order. If a meeting fails, those who had arrived say so in the store. Those who had arrived and say
    nothing are missing, and so are those who have not arrived.

    Args:
        rank: Rank of this process, from 0.
        size: Number of processes.

    Attributes:
        turns: What each process is doing until the next meeting, by rank, as far as this one knows.
        is_broken: Whether a process is missing; there are no more meetings then.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.turns: Mapping[int, str] = {}
        self.is_broken = False
        self._count = 0
        self._is_ending = False
        self._next_look = 0.0
        self._note_count()
        _store().set(_ending_key(rank), "0")

    def begin(self, turns: Mapping[int, str]) -> None:
        """Note what each process does until the next meeting, by rank."""
        self.turns = turns
        self.note(turns[self.rank])

    def note(self, turn: str) -> None:
        """Tell the other processes what this one does, in case it does not arrive."""
        _store().set(_turn_key(self.rank), turn)

    def must_end(self, is_told: bool) -> bool:
        """Whether this process or another was told to end; it tells the others, and asks them once a second."""
        if is_told and not self._is_ending:
            _store().set(_ending_key(self.rank), "1")
        if not is_told and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 1.0
            is_told = self._another_ends()
        self._is_ending |= is_told
        return self._is_ending

    def _another_ends(self) -> bool:
        others, store = [rank for rank in range(self.size) if rank != self.rank], _store()
        try:
            return within(PATIENCE, lambda: any(_number(store, _ending_key(rank)) > 0 for rank in others))
        except (TimeoutError, RuntimeError):
            return False  # the next meeting finds out who is missing

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Enclose what all processes do together.

        Raises:
            LostProcessError: If a process does not arrive, or ends or hangs in the meeting. If there is no such
                process, the block's own error is raised.
        """
        try:
            self._count += 1
            self._note_count()
            yield
            self._count += 1
            self._note_count()
        except RuntimeError as error:  # from torch.distributed: a closed connection, or a timeout
            missing, is_sure = self._missing()
            if not missing:
                raise
            self.is_broken = True
            raise LostProcessError(_explanation(missing, is_sure, self.turns, error)) from error

    def _note_count(self) -> None:
        _store().set(_key(self.rank), str(self._count))

    def _missing(self) -> tuple[list[int], bool]:
        """The missing ranks, and whether that is certain: process 0 may have ended, and its store with it."""
        others, store = [rank for rank in range(self.size) if rank != self.rank], _store()
        try:
            counts = within(PATIENCE, lambda: {rank: _number(store, _key(rank)) for rank in others})
            known = within(PATIENCE, lambda: {rank: _text(store, _turn_key(rank)) for rank in others})
            self.turns = {**self.turns, **{rank: turn for rank, turn in known.items() if turn}}
            silent = self._silent([rank for rank in others if counts[rank] == self._count], store)
            return [rank for rank in others if rank in silent or counts[rank] < self._count], True
        except TimeoutError:
            return [0], True  # its store does not answer, so it was stopped, or its machine cannot be reached
        except RuntimeError:
            return others, self.size == 2

    def _silent(self, arrived: Sequence[int], store: Any) -> list[int]:
        """Call the roll of those who had arrived at a meeting that failed: the ranks that do not answer."""
        if dist.get_backend() != "gloo":
            return []
        store.set(_failed_key(self.rank), str(self._count))
        self.is_broken = True
        dist.destroy_process_group()  # others may be waiting for another process: now they get an error too
        silent, end = list(arrived), time.monotonic() + PATIENCE
        while silent and time.monotonic() < end:
            time.sleep(0.05)
            silent = within(PATIENCE, partial(_below, store, silent, self._count))
        if self.rank == 0:
            time.sleep(1.0)  # the others read the store of this process
        return silent


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Ask something that may never be answered: torch waits without bound for the store of a stopped process.

    Raises:
        TimeoutError: If there is no answer in time.

    Example:
        >>> within(9.0, lambda: 2 + 3)
        5
    """
    answers: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            answers.append((ask(), None))
        except BaseException as error:
            answers.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answers:
        raise TimeoutError
    value, error = answers[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _key(rank: int) -> str:
    return f"lightning_spectral/meetings of process {rank}"


def _turn_key(rank: int) -> str:
    return f"lightning_spectral/turn of process {rank}"


def _ending_key(rank: int) -> str:
    return f"lightning_spectral/process {rank} was told to end"


def _failed_key(rank: int) -> str:
    return f"lightning_spectral/failed meeting of process {rank}"


def _below(store: Any, ranks: Sequence[int], count: int) -> list[int]:
    return [rank for rank in ranks if _number(store, _failed_key(rank)) < count]


def _number(store: Any, key: str) -> int:
    return int(store.get(key)) if store.check([key]) else -1


def _text(store: Any, key: str) -> str:
    return str(store.get(key).decode()) if store.check([key]) else ""


def _explanation(missing: Sequence[int], is_sure: bool, turns: Mapping[int, str], error: Exception) -> str:
    """What has happened and how to continue; the last line is torch's message.

    Example:
        >>> print(_explanation([1], True, {1: "round 3, client 7"}, RuntimeError("Connection closed by peer")))
        Process 1 (round 3, client 7) is missing from a meeting of the processes: it has ended, and its own output says
        why, or it hangs, or it needs longer than the `timeout` of ClientParallelStrategy. ...
        Connection closed by peer
    """
    named = ", ".join(f"{rank} ({turns[rank]})" if rank in turns else str(rank) for rank in missing)
    who = f"Process {named} is missing from a meeting of the processes: it"
    if not is_sure:
        who = f"One of the processes {named} is missing from a meeting, and process 0, which knows who, is gone: it"
    elif len(missing) > 1:
        who = f"Processes {named} are missing from a meeting of the processes: one of them"
    return (
        f"{who} has ended, and its own output says why, or it hangs, or it needs longer than the `timeout` of "
        "ClientParallelStrategy. End what is left, and start all processes again: with "
        f"fit(..., ckpt_path=latest_checkpoint(folder)) the run goes on from its last saved round.\n{error}"
    )
