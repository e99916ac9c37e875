"""Assigns work to processes: dealt so that all finish together, or scheduled slot by slot."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_spectral.protocol.work_unit import WorkUnit

Slots = list[WorkUnit | None]


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


def num_slots(num_units: int, num_processes: int) -> int:
    """Length of a round's schedule: the number of slots of each process, including idle ones.

    Example:
        >>> num_slots(10, num_processes=1), num_slots(10, num_processes=3), num_slots(2, num_processes=3)
        (10, 4, 1)
    """
    return max(1, -(-num_units // num_processes))


def schedule(units: Sequence[WorkUnit], work: Sequence[float], num_processes: int) -> list[Slots]:
    """Schedule a round: for each process, the unit that it trains in each slot, or ``None`` where it idles.

    Lightning does not let a process begin a slot until all have finished the previous one, so a slot lasts as long as
    its longest unit. So units of similar size share a slot: they are sorted, longest first, and dealt row by row.
    With P processes a round is longer than an even share of its work by at most (P - 1) / P times the difference
    between the longest unit and the shortest, if none idles. A single process takes the units in the given order.

    Args:
        units: The round's units.
        work: Predicted time of each, any unit of time.
        num_processes: Number of processes that share the round.

    Example:
        >>> slots = schedule([WorkUnit(7), WorkUnit(8), WorkUnit(9)], [50.0, 100.0, 40.0], num_processes=2)
        >>> [[unit and unit.client_id for unit in process] for process in slots]
        [[8, 9], [7, None]]
    """
    if num_processes == 1:
        return [list(units)]
    order = sorted(range(len(units)), key=lambda i: (-work[i], i))
    row_by_row: Slots = [units[i] for i in order]
    row_by_row += [None] * (num_slots(len(units), num_processes) * num_processes - len(units))
    return [row_by_row[process::num_processes] for process in range(num_processes)]


def predicted_work(num_examples: int, keep_ratio: float) -> float:
    """Predicted time of a client's turn, in units of one example through the whole model.

    Half of a step's time does not depend on the number of terms: activations, batches, and the layers that stay dense.

    Example:
        >>> predicted_work(100, keep_ratio=0.5)
        75.0
    """
    return num_examples * (1.0 + keep_ratio) / 2.0
