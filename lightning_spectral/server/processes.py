"""The processes of a run: how they share work, and communicate in plain torch.distributed; a single one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_spectral.errors import RoundError
from lightning_spectral.protocol.records import WorkUnit
from lightning_spectral.server.meetings import Meetings
from lightning_spectral.sums.exact_mean import Peers

T = TypeVar("T")
Tensors = tuple[Tensor, ...]
Layout = Sequence[Sequence[tuple[tuple[int, ...], torch.dtype]]]
_BUCKET = 2**22  # values that are added up at a time


@dataclass(frozen=True)
class Processes(Peers):
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
        if self.size == 1:
            return [do()]
        mine, error = _try(do)
        gathered = self.gather((_text(error, kind), mine))
        raise_everywhere([text for text, _ in gathered], error, kind)
        return [cast(T, result) for _, result in gathered]

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace int64 tensors by their sums over processes, in place."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
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
            return [do(piece) for piece in pieces]
        dealt = deal([cost(piece) for piece in pieces], self.size)
        mine, error = _try_all(do, [pieces[i] for i in dealt[self.rank]])
        gathered = self.gather((_text(error), [[(tuple(t.shape), t.dtype) for t in tensors] for tensors in mine]))
        raise_everywhere([text for text, _ in gathered], error, RoundError)
        results: dict[int, Tensors] = {}
        for owner, (_, layout) in enumerate(gathered):
            results.update(zip(dealt[owner], self._broadcast(owner, mine, layout), strict=True))
        return [results[i] for i in range(len(pieces))]

    def _broadcast(self, owner: int, mine: list[Tensors], layout: Layout) -> list[Tensors]:
        """Broadcast the tensors that one process computed, in one message for each dtype."""
        received = mine if owner == self.rank else [self._empty(one) for one in layout]
        for dtype in dict.fromkeys(dtype for one in layout for _, dtype in one):
            tensors = [tensor for one in received for tensor in one if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            with self._meeting():
                dist.broadcast(flat, owner)
            if owner != self.rank:
                for tensor, values in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                    tensor.copy_(values.view_as(tensor))
        return received

    def _empty(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensors:
        return tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in layout)


def raise_everywhere(texts: Sequence[str | None], own: Exception | None, kind: type[Exception]) -> None:
    """Raise the same error in every process if anything failed in one of them.

    Args:
        texts: Error message of each process, the same list in all of them; ``None`` where nothing failed.
        own: The exception of this process, if there is one.
        kind: Class of the error.

    Example:
        >>> raise_everywhere([None, "disk full"], None, RuntimeError)
        Traceback (most recent call last):
        RuntimeError: disk full (process 1)
    """
    if failed := [f"{text} (process {rank})" for rank, text in enumerate(texts) if text is not None]:
        raise kind("\n".join(failed)) from own


def _try_all(do: Callable[[T], Tensors], pieces: Sequence[T]) -> tuple[list[Tensors], Exception | None]:
    try:
        return [do(piece) for piece in pieces], None
    except Exception as error:
        return [], error


def _try(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _text(error: Exception | None, kind: type[Exception] | None = None) -> str | None:
    """An error's text, with its class unless the error that all processes raise has the same class."""
    if error is None:
        return None
    return str(error) if kind is not None and type(error) is kind else f"{type(error).__name__}: {error}"


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of tensors that together have at most 2^22 values, or of a single larger tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in [*bucket, tensor]) > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


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


def predicted_work(num_examples: int, keep_ratio: float) -> float:
    """Predicted time of a client's turn, in units of one example through the whole model.

    Half of a step's time does not depend on the number of terms: activations, batches, and the layers that stay dense.

    Example:
        >>> predicted_work(100, keep_ratio=0.5)
        75.0
    """
    return num_examples * (1.0 + keep_ratio) / 2.0
