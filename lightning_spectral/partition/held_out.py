"""Holds out some of each client's examples, on which the client never trains."""

import torch
from torch import Tensor

from lightning_spectral.partition.partition import Partition

__all__ = ["hold_out"]


def hold_out(partition: Partition, fraction: float, generator: torch.Generator) -> tuple[Partition, Partition]:
    """Split each client's examples at random into those that it trains on and those that are held out.

    A client with two examples or more has at least one of each kind; a client with a single example trains on it.

    Args:
        partition: The examples of every client.
        fraction: Share to hold out, in ``[0, 1)``, rounded to whole examples client by client.
        generator: CPU generator, the only source of randomness; not drawn from if ``fraction`` is 0.

    Returns:
        Two partitions of the same clients: the training examples, in their order in ``partition``, and the others.

    Example:
        >>> whole = Partition.from_lists([range(10), range(10, 30), [30]])
        >>> training, held_out = hold_out(whole, 0.1, torch.Generator().manual_seed(0))
        >>> training.sizes, held_out.sizes
        (tensor([ 9, 18,  1]), tensor([1, 2, 0]))
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"The share of examples to hold out must be in [0, 1), got {fraction}.")
    sizes = partition.sizes
    if fraction == 0:
        return partition, _of_rows(partition.indices[:0], torch.zeros_like(sizes))
    counts = (sizes.double() * fraction).round().long().clamp(min=1).minimum((sizes - 1).clamp(min=0))
    is_held_out = _chosen(partition, counts, generator)
    return (
        _of_rows(partition.indices[~is_held_out], sizes - counts),
        _of_rows(partition.indices[is_held_out], counts),
    )


def _chosen(partition: Partition, counts: Tensor, generator: torch.Generator) -> Tensor:
    """Whether each of the partition's entries is among those drawn from its client, shape ``(num_assigned,)``."""
    owner = torch.arange(partition.num_clients).repeat_interleave(partition.sizes)
    shuffled = torch.randperm(partition.num_assigned, generator=generator)
    by_client = shuffled[torch.argsort(owner[shuffled], stable=True)]  # each client's entries in random order
    place = torch.arange(partition.num_assigned) - partition.offsets[owner]
    is_chosen = torch.empty(partition.num_assigned, dtype=torch.bool)
    is_chosen[by_client] = place < counts[owner]
    return is_chosen


def _of_rows(indices: Tensor, sizes: Tensor) -> Partition:
    """Partition from all clients' examples, one client after another, and the number of each."""
    return Partition(indices, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]))
