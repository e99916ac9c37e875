"""The interface of a partitioner, and what partitioners share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_spectral.partition.partition import Partition

__all__ = ["Partitioner", "check_one_per_example", "equal_shares"]


class Partitioner(ABC):
    """Base class of partitioners, which deal the examples of a data set to clients.

    A partitioner is a frozen dataclass that implements :meth:`split`. ``partitioner(num_examples, labels, generator)``
    checks the arguments and returns the :class:`Partition`, a pure function of them. ``testing.check_partitioner``
    checks that a partitioner satisfies this contract.

    Attributes:
        needs_labels: Whether the split depends on the labels; if not, they may be ``None``.
        num_clients: Number of clients, at least 1.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Blocks(Partitioner):
        ...     num_clients: int
        ...     def split(self, num_examples, labels, generator):
        ...         client = torch.arange(num_examples) * self.num_clients // num_examples
        ...         return Partition.from_assignment(client, self.num_clients)
        >>> list(Blocks(num_clients=2)(4, None, torch.Generator()))
        [tensor([0, 1]), tensor([2, 3])]
    """

    needs_labels: ClassVar[bool] = False
    num_clients: int

    def __call__(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        """Deal the examples to the clients.

        Args:
            num_examples: Number of examples.
            labels: Class of each example, integers, shape ``(num_examples,)``, or ``None``.
            generator: CPU generator, the only source of randomness.

        Returns:
            The partition; every client owns at least one example.
        """
        name = type(self).__name__
        if self.num_clients > num_examples:
            raise ValueError(
                f"{name}(num_clients={self.num_clients}) needs at least one example per client, "
                f"got {num_examples} examples; lower num_clients or add data."
            )
        if labels is not None:
            _check_labels(labels, num_examples)
        elif self.needs_labels:
            raise ValueError(f"{name} splits by class; pass labels=... with one class index per example.")
        return self.split(num_examples, labels, generator)

    @abstractmethod
    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        """Deal the examples; the arguments are already checked by :meth:`__call__`."""


def equal_shares(num_examples: int, num_clients: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Client ids in random order with their shares; the first ``num_examples % num_clients`` get an extra example.

    Both are int64 of shape ``(num_clients,)``.

    Example:
        >>> order, sizes = equal_shares(11, 4, torch.Generator().manual_seed(0))
        >>> sizes
        tensor([3, 3, 3, 2])
    """
    share, remainder = divmod(num_examples, num_clients)
    order = torch.randperm(num_clients, generator=generator)
    return order, share + (torch.arange(num_clients) < remainder).long()


def _check_labels(labels: Tensor, num_examples: int) -> None:
    if labels.shape != (num_examples,):
        raise ValueError(
            f"`labels` must hold one class index per example, shape ({num_examples},), got {tuple(labels.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"`labels` must be integers, got {labels.dtype}; pass class indices.")


def check_one_per_example(argument: str, entries: Any) -> None:
    """Raise ``TypeError`` for entries without an order: a mapping would be read as its keys, a string as its letters.

    Example:
        >>> check_one_per_example("keys", "user")
        Traceback (most recent call last):
        TypeError: `keys` must list one entry per example, got 'user'; if it is a column, write keys=table['user'].
    """
    if isinstance(entries, str):
        remedy = f"; if it is a column, write {argument}=table[{entries!r}]"
        raise TypeError(f"`{argument}` must list one entry per example, got {entries!r}{remedy}.")
    if isinstance(entries, Mapping | set | frozenset | type) or not isinstance(entries, Iterable):
        shown = f"a {type(entries).__name__}" if isinstance(entries, Mapping | set | frozenset) else repr(entries)
        raise TypeError(f"`{argument}` must list one entry per example, in the order of the data set, got {shown}.")
