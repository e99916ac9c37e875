"""The processes of a run: how they share work and meet, in plain torch.distributed; a single one does neither."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_spectral.errors import LostProcessError, RoundError
from lightning_spectral.protocol.cohort import Workers
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.sums.exact_mean import MESSAGE, Peers

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Layout = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
KEY = "lightning_spectral/{} of process {}"  # in the store
PATIENCE = 5.0  # seconds to wait for the store, or for processes that have just been disconnected


@dataclass(frozen=True)
class Processes(Peers, Workers):
    """This process among those that train the same rounds; all of them call these methods together.

    Attributes:
        rank: Rank of this process, from 0.
        size: Number of processes.
        device: Device on which this process holds tensors.
        meetings: Tells which process is missing if one is lost; ``None`` for torch's own errors.

    Example:
        >>> Processes().gather("alone")
        ['alone']
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    meetings: Meetings | None = None

    def _meeting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.meetings is None else self.meetings.meeting()

    def gather(self, value: T) -> list[T]:
        """Gather one picklable value from every process, in the order of their ranks."""
        values: list[Any] = [value]
        if self.size > 1:
            values = [None] * self.size
            with self._meeting():
                dist.all_gather_object(values, value)
        return values

    def gather_results(self, do: Callable[[], T], kind: type[Exception]) -> list[T]:
        """Have every process do its part of some work, and gather the picklable results in the order of the ranks.

        Args:
            do: Does this process's part.
            kind: Class of the error that all processes raise if one of several fails.

        Example:
            >>> Processes().gather_results(lambda: 2 + 3, RuntimeError)
            [5]
        """
        if self.size == 1:  # an error that passes through variables would keep alive what failed
            return [do()]
        mine, error, failed = _try(do, kind)
        gathered = self.gather((failed, mine))
        raise_everywhere([text for text, _ in gathered], error, kind)
        return [cast(T, result) for _, result in gathered]

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        if self.size == 1:
            return
        buckets: list[list[Tensor]] = []  # of one message each
        for tensor in tensors:
            if buckets and sum(t.numel() for t in [*buckets[-1], tensor]) <= MESSAGE:
                buckets[-1].append(tensor)
            else:
                buckets.append([tensor])
        for bucket in buckets:
            flat = torch.cat([tensor.reshape(-1).to(self.device) for tensor in bucket])
            with self._meeting():
                dist.all_reduce(flat)
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, total in zip(bucket, torch.split(flat, sizes), strict=True):
                tensor.copy_(total.view_as(tensor))

    def share_out(self, pieces: Sequence[T], do: Callable[[T], Tensors], cost: Callable[[T], float]) -> list[Tensors]:
        """Do each piece of work in one process and send its tensors to all processes, bit for bit.

        Args:
            pieces: The work, the same list in every process.
            do: Maps a piece to its tensors.
            cost: Predicted time of a piece, any unit.

        Raises:
            RoundError: If there are several processes and a piece failed in one of them; raised in all of them.
        """
        if self.size == 1:
            return super().share_out(pieces, do, cost)
        dealt = deal([cost(piece) for piece in pieces], self.size)
        done, error, failed = _try(lambda: [do(pieces[i]) for i in dealt[self.rank]])
        mine = done or []
        gathered = self.gather((failed, [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in mine]))
        raise_everywhere([text for text, _ in gathered], error, RoundError)
        results: dict[int, Tensors] = {}
        for owner, (_, layout) in enumerate(gathered):
            results.update(zip(dealt[owner], self._broadcast(owner, mine, layout), strict=True))
        return [results[i] for i in range(len(pieces))]

    def _broadcast(self, owner: int, mine: list[Tensors], layout: Layout) -> list[Tensors]:
        """Broadcast the tensors that one process computed, in one message for each dtype."""
        received = mine
        if owner != self.rank:
            received = [tuple(torch.empty(s, dtype=d, device=self.device) for s, d in one) for one in layout]
        for dtype in dict.fromkeys(dtype for one in layout for _, dtype in one):
            tensors = [tensor for one in received for tensor in one if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            with self._meeting():
                dist.broadcast(flat, owner)
            if owner != self.rank:
                for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                    tensor.copy_(values.view_as(tensor))
        return received


def raise_everywhere(texts: Sequence[str | None], own: Exception | None, kind: type[Exception]) -> None:
    """Raise the same error in every process if anything failed in one of them; a single one raises its own.

    Args:
        texts: Error message of each process, the same list in all of them; ``None`` where nothing failed.
        own: The exception of this process, if there is one.
        kind: Class of the error.

    Example:
        >>> raise_everywhere([None, "disk full"], None, RuntimeError)
        Traceback (most recent call last):
        RuntimeError: disk full (process 1)
    """
    if own is not None and len(texts) == 1:
        raise own
    if failed := [f"{text} (process {rank})" for rank, text in enumerate(texts) if text is not None]:
        raise kind("\n".join(failed)) from own


def _try(do: Callable[[], T], kind: type[Exception] | None = None) -> tuple[T | None, Exception | None, str | None]:
    """The result, or the error with its text, which names its class unless all processes raise the same one."""
    try:
        return do(), None, None
    except Exception as error:
        return None, error, str(error) if type(error) is kind else f"{type(error).__name__}: {error}"


def deal(work: Sequence[float], num_processes: int) -> list[list[int]]:
    """Deal pieces of work to processes, the longest first, each to the process with the least work so far.

    Args:
        work: Predicted time of each piece, any unit, not negative.
        num_processes: Number of processes that share the work.

    Returns:
        For each process, the indices of its pieces, longest first. A pure function: ties go to the lower index.

    Reference:
        Graham (1969): the last process finishes at most 4/3 times as late as under the best possible assignment.

    Example:
        >>> deal([1.0, 5.0, 4.0, 2.0], num_processes=2)
        [[1, 0], [2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0.0] * num_processes
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        process = min(range(num_processes), key=lambda p: (loads[p], len(dealt[p]), p))
        dealt[process].append(index)
        loads[process] += work[index]
    return dealt


def shares(units: Sequence[WorkUnit], work: Sequence[float], num_processes: int) -> list[list[WorkUnit]]:
    """Each process's share of a round, dealt so that all finish together; a single process keeps the given order.

    Args:
        units: The round's units.
        work: Predicted time of each, any unit of time; not read for a single process.
        num_processes: Number of processes that share the round.

    Example:
        >>> dealt = shares([WorkUnit(7), WorkUnit(8), WorkUnit(9)], [50.0, 100.0, 40.0], num_processes=2)
        >>> [[unit.client_id for unit in share] for share in dealt]
        [[8], [7, 9]]
    """
    if num_processes == 1:
        return [list(units)]
    return [[units[index] for index in share] for share in deal(work, num_processes)]


def predicted_work(num_examples: float, keep_ratio: float) -> float:
    """Predicted time of a client's turn, in units of one example through the whole model.

    Half of a step's time does not depend on the number of terms: activations, batches, and the layers that stay dense.

    Example:
        >>> predicted_work(100, keep_ratio=0.5)
        75.0
    """
    return num_examples * (1.0 + keep_ratio) / 2.0


class Meetings:
    """Counts the meetings of this process in the store through which the processes found each other.

    There the others can read the count: one when a process arrives, and one more when it leaves. All processes meet in
    the same order. If a meeting fails, those who had arrived say so in the store. Those who had arrived and say
    nothing are missing, and so are those who have not arrived.

    Attributes:
        rank, size: Rank of this process, from 0, and number of processes.
        turns: What each process is doing until the next meeting, by rank, as far as this one knows.
        is_broken: Whether a process is missing; there are no more meetings then.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._others = [other for other in range(size) if other != rank]
        self.turns: Mapping[int, str] = {}
        self.is_broken = self._is_ending = False
        self._count, self._next_look = 0, 0.0
        self._set("meetings", "0")
        self._set("end", "0")

    def begin(self, turns: Mapping[int, str]) -> None:
        """Note what each process does until the next meeting, by rank."""
        self.turns = turns
        self.note(turns[self.rank])

    def note(self, turn: str) -> None:
        """Tell the other processes what this one does, in case it does not arrive."""
        self._set("turn", turn)

    def must_end(self, is_told: bool) -> bool:
        """Whether this process or another was told to end; it tells the others, and asks them once a second."""
        if is_told and not self._is_ending:
            self._set("end", "1")
        if not is_told and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + 1.0
            with suppress(TimeoutError, RuntimeError):  # the next meeting finds out who is missing
                is_told = "1" in _said(_store(), "end", self._others).values()
        self._is_ending |= is_told
        return self._is_ending

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Enclose what all processes do together.

        Raises:
            LostProcessError: If a process does not arrive, or ends or hangs in the meeting. If there is no such
                process, the block's own error is raised.
        """
        try:
            self._count += 1
            self._set("meetings", str(self._count))
            yield
            self._count += 1
            self._set("meetings", str(self._count))
        except RuntimeError as error:  # from torch.distributed: a closed connection, or a timeout
            missing, is_sure = self._missing()
            if not missing:
                raise
            self.is_broken = True
            raise LostProcessError(_explanation(missing, is_sure, self.turns, error)) from error

    def _set(self, what: str, value: str) -> None:
        _store().set(KEY.format(what, self.rank), value)

    def _missing(self) -> tuple[list[int], bool]:
        """The missing ranks, and whether that is certain: process 0 may have ended, and its store with it."""
        others, store = self._others, _store()
        try:
            counts = {rank: int(count) for rank, count in _said(store, "meetings", others).items()}
            self.turns = {**self.turns, **_said(store, "turn", others)}
            silent = self._silent([rank for rank in others if counts.get(rank) == self._count], store)
            return [rank for rank in others if rank in silent or counts.get(rank, -1) < self._count], True
        except TimeoutError:
            return [0], True  # its store does not answer, so it was stopped, or its machine cannot be reached
        except RuntimeError:
            return others, self.size == 2

    def _silent(self, arrived: Sequence[int], store: Any) -> list[int]:
        """Call the roll of those who had arrived at a meeting that failed: the ranks that do not answer."""
        if dist.get_backend() != "gloo":
            return []
        self._set("failed meeting", str(self._count))
        self.is_broken = True
        dist.destroy_process_group()  # others may be waiting for another process: now they get an error too
        silent, end = list(arrived), time.monotonic() + PATIENCE
        while silent and time.monotonic() < end:
            time.sleep(0.05)
            noted = _said(store, "failed meeting", arrived)
            silent = [rank for rank in arrived if int(noted.get(rank, -1)) < self._count]
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
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError
    return answer.result()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _said(store: Any, what: str, ranks: Sequence[int]) -> dict[int, str]:
    """What processes have said last, by rank; without those that have said nothing. Errors as for `within`."""
    keys = {rank: KEY.format(what, rank) for rank in ranks}
    return within(PATIENCE, lambda: {r: store.get(key).decode() for r, key in keys.items() if store.check([key])})


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
