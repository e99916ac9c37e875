"""Which process does what: work dealt so that processes finish together."""

from __future__ import annotations

from collections.abc import Sequence

Turns = list[int | None]


def deal(work: Sequence[float], num_processes: int, most: int | None = None) -> list[list[int]]:
    """Deal pieces of work to processes, the longest first, each to whoever has least so far.

    Args:
        work: Predicted time of each piece, any unit, not negative.
        num_processes: How many share the work.
        most: Pieces that one process takes at most; ``None`` for any number.

    Returns:
        For each process its pieces, by index, longest first. A pure function: ties go to the lower index.

    Reference:
        Graham (1969): the last process is done at most 4/3 as late as with the best of all dealings (without `most`).

    Example:
        >>> deal([1.0, 5.0, 4.0, 2.0], num_processes=2)
        [[1, 0], [2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [0.0] * num_processes
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        free = [p for p in range(num_processes) if most is None or len(dealt[p]) < most]
        process = min(free, key=lambda p: (loads[p], len(dealt[p]), p))
        dealt[process].append(index)
        loads[process] += work[index]
    return dealt


def num_turns(num_clients: int, num_processes: int) -> int:
    """Turns that every process takes in a round, clients and idle ones.

    Twice an even share: a process may have that many small clients while another trains a large one. It depends on
    nothing else, because Lightning learns the length of an epoch once.

    Example:
        >>> num_turns(10, num_processes=1), num_turns(10, num_processes=2), num_turns(2, num_processes=3)
        (10, 9, 1)
    """
    return max(1, min(num_clients - num_processes + 1, 2 * -(-num_clients // num_processes)))


def turns(client_ids: Sequence[int], work: Sequence[float], num_processes: int) -> list[Turns]:
    """The turns of every process in one round, ``None`` where it idles; in a single one, the clients as they come.

    Lightning lets no process begin a turn before process 0 has begun the same turn. So process 0 gets the lightest
    share, idles first and trains its smallest clients first; the others train their largest first and idle last. Then
    nobody waits as long as the predictions hold: the mean of process 0's first i turns is at most the mean of all its
    turns, that of the others at least.

    Args:
        client_ids: The round's clients.
        work: Predicted time of each, any unit.
        num_processes: How many share the round.

    Example:
        >>> turns([7, 8, 9], [100.0, 50.0, 40.0], num_processes=2)
        [[9, 8], [7, None]]
    """
    if num_processes == 1:
        return [list(client_ids)]
    length = num_turns(len(client_ids), num_processes)
    dealt = deal(work, num_processes, most=length)
    lightest, *others = sorted(dealt, key=lambda share: sum(work[i] for i in share))
    idle = [[None] * (length - len(share)) for share in (lightest, *others)]
    ids = [[client_ids[i] for i in share] for share in (lightest, *others)]
    return [[*idle[0], *reversed(ids[0])], *([*share, *rest] for share, rest in zip(ids[1:], idle[1:], strict=True))]


def predicted_work(num_examples: int, keep_ratio: float) -> float:
    """Time of a client's turn, in units of one example through the whole model.

    Half of a step's time does not depend on the number of terms: activations, batches, the layers that stay dense.

    Example:
        >>> predicted_work(100, keep_ratio=0.5)
        75.0
    """
    return num_examples * (1.0 + keep_ratio) / 2.0
