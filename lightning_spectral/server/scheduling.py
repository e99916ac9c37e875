"""Which process does what: work dealt so that processes finish together, or turn by turn."""

from __future__ import annotations

from collections.abc import Sequence

Turns = list[int | None]


def deal(work: Sequence[float], num_processes: int) -> list[list[int]]:
    """Deal pieces of work to processes, the longest first, each to whoever has least so far.

    Args:
        work: Predicted time of each piece, any unit, not negative.
        num_processes: How many share the work.

    Returns:
        For each process its pieces, by index, longest first. A pure function: ties go to the lower index.

    Reference:
        Graham (1969): the last process is done at most 4/3 as late as with the best of all dealings.

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


def num_turns(num_clients: int, num_processes: int) -> int:
    """Turns that every process takes in a round, clients and idle ones.

    Example:
        >>> num_turns(10, num_processes=1), num_turns(10, num_processes=3), num_turns(2, num_processes=3)
        (10, 4, 1)
    """
    return max(1, -(-num_clients // num_processes))


def turns(client_ids: Sequence[int], work: Sequence[float], num_processes: int) -> list[Turns]:
    """The turns of every process in one round, ``None`` where it idles; in a single one, the clients as they come.

    Lightning lets no process begin a turn before all have ended the one before, so a turn lasts as long as its
    longest client. Clients of like size therefore share a turn: sorted, longest first, and dealt row by row. With P
    processes a round is longer than an even share of its work by at most (P - 1) / P times the difference between the
    longest client and the shortest, if nobody idles.

    Args:
        client_ids: The round's clients.
        work: Predicted time of each, any unit.
        num_processes: How many share the round.

    Example:
        >>> turns([7, 8, 9], [50.0, 100.0, 40.0], num_processes=2)
        [[8, 9], [7, None]]
    """
    if num_processes == 1:
        return [list(client_ids)]
    order = sorted(range(len(client_ids)), key=lambda i: (-work[i], i))
    sorted_ids: Turns = [client_ids[i] for i in order]
    idle = num_turns(len(client_ids), num_processes) * num_processes - len(sorted_ids)
    return [[*sorted_ids, *[None] * idle][process::num_processes] for process in range(num_processes)]


def predicted_work(num_examples: int, keep_ratio: float) -> float:
    """Time of a client's turn, in units of one example through the whole model.

    Half of a step's time does not depend on the number of terms: activations, batches, the layers that stay dense.

    Example:
        >>> predicted_work(100, keep_ratio=0.5)
        75.0
    """
    return num_examples * (1.0 + keep_ratio) / 2.0
