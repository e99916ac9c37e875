"""Deals examples to clients of equal size, by a law for how many examples of each class a client gets."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_spectral.partition.base import equal_shares
from lightning_spectral.partition.partition import Partition

__all__ = ["CountLaw", "Ints", "deal_by_class", "draw_slot_classes"]

Ints: TypeAlias = npt.NDArray[np.int64]
# Maps the numbers of examples left in each class, shape (K,), and a client's total to its numbers in each class.
CountLaw: TypeAlias = Callable[[Ints, int, np.random.Generator], Ints]


def deal_by_class(labels: Tensor, num_clients: int, draw: CountLaw, generator: torch.Generator) -> Partition:
    """Deal all examples to clients, which are served one after another, in random order.

    Sizes differ by at most one. ``draw`` says how many examples of each class a client gets, of only the classes that
    are present, in sorted order; within a class, examples are assigned at random.

    Example:
        >>> def first_come(left, num_draws, rng):
        ...     return np.diff(np.minimum(left.cumsum(), num_draws), prepend=0)
        >>> labels = torch.tensor([7, 7, 4, 4])
        >>> partition = deal_by_class(labels, 2, first_come, torch.Generator().manual_seed(0))
        >>> sorted(labels[own].tolist() for own in partition)
        [[4, 4], [7, 7]]
    """
    _, inverse, class_sizes = np.unique(labels.cpu().numpy(), return_inverse=True, return_counts=True)
    class_of_example = torch.from_numpy(inverse)
    order, sizes = equal_shares(len(labels), num_clients, generator)
    class_of_slot = draw_slot_classes(class_sizes, sizes.numpy(), draw, _numpy_generator(generator))
    # both sides list the classes in order, with equal counts; within a class the order is random
    shuffled = torch.randperm(len(labels), generator=generator)
    examples = shuffled[class_of_example[shuffled].argsort(stable=True)]
    slots = torch.from_numpy(class_of_slot).argsort(stable=True)
    client_of_example = torch.empty(len(labels), dtype=torch.int64)
    client_of_example[examples] = order.repeat_interleave(sizes)[slots]
    return Partition.from_assignment(client_of_example, num_clients)


def draw_slot_classes(class_sizes: Ints, client_sizes: Ints, draw: CountLaw, rng: np.random.Generator) -> Ints:
    """Draw the class of every slot, client by client, for clients served in the given order.

    There are as many slots as the sum of ``client_sizes``, which is at most that of ``class_sizes``.

    Example:
        >>> def one_of_each(left, num_draws, rng):
        ...     return np.ones_like(left)
        >>> draw_slot_classes(np.array([2, 2]), np.array([2, 2]), one_of_each, np.random.default_rng(0))
        array([0, 1, 0, 1])
    """
    left = class_sizes.copy()
    slots = np.empty(client_sizes.sum(), dtype=np.int64)
    ends = client_sizes.cumsum()
    for start, end in zip(ends - client_sizes, ends, strict=True):
        counts = draw(left, end - start, rng)
        slots[start:end] = np.repeat(np.arange(len(counts)), counts)
        left -= counts
    return slots


def _numpy_generator(generator: torch.Generator) -> np.random.Generator:
    # torch's public gamma draw takes no generator
    return np.random.Generator(np.random.PCG64(int(torch.randint(2**63 - 1, (), generator=generator))))
