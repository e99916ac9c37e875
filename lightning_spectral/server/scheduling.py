"""Assigns work to processes, so that all finish together."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spectral.protocol.work_unit import WorkUnit


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
