"""The partition of a data set's examples among clients, what is held out of it, and the contract of a partitioner."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """Examples of every client, in compressed sparse row form: two tensors, for any number of clients.

    ``partition[client_id]`` is a view of shape ``(sizes[client_id],)``; iterating gives the clients in order.
    Examples owned by no client are absent.

    Attributes:
        indices: Example indices, one client after another, int64, shape ``(num_assigned,)``, on the CPU.
        offsets: Client c owns ``indices[offsets[c]:offsets[c + 1]]``, int64, shape ``(num_clients + 1,)``.

    Example:
        >>> partition = Partition.from_lists([[4, 0], [], [2, 3, 1]])
        >>> partition[2], partition.sizes
        (tensor([2, 3, 1]), tensor([2, 0, 3]))
        >>> partition
        Partition(num_clients=3, num_assigned=5)
    """

    indices: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        for name, tensor in (("indices", self.indices), ("offsets", self.offsets)):
            if tensor.dtype != torch.int64 or tensor.ndim != 1 or tensor.device.type != "cpu":
                raise ValueError(
                    f"`{name}` must be a one-dimensional int64 tensor on the CPU, "
                    f"got {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}."
                )
        if self.offsets.numel() < 2:
            raise ValueError("A partition must have at least one client, got none.")
        if self.offsets[0] != 0 or self.offsets[-1] != self.indices.numel() or bool((self.sizes < 0).any()):
            raise ValueError(f"`offsets` must rise from 0 to len(indices)={self.indices.numel()}.")
        if bool((self.indices < 0).any()):
            raise ValueError(f"Example indices must be >= 0, got {int(self.indices.min())}.")

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int] | Tensor]) -> "Partition":
        """Create a partition from the example indices of each client, kept in the given order."""
        rows = [torch.as_tensor(row, dtype=torch.int64) for row in lists]
        indices = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        return cls(indices, _offsets(torch.tensor([row.numel() for row in rows], dtype=torch.int64)))

    @classmethod
    def from_assignment(cls, client_of_example: Tensor, num_clients: int) -> "Partition":
        """Create a partition from the owner of each example; a client's examples are in ascending order.

        Args:
            client_of_example: Client ids, integers, shape ``(num_examples,)``; -1 for an example without an owner.
            num_clients: Number of clients; those that do not occur own nothing.

        Example:
            >>> list(Partition.from_assignment(torch.tensor([1, 0, -1, 1]), num_clients=2))
            [tensor([1]), tensor([0, 3])]
        """
        owner = client_of_example.to("cpu", torch.int64)
        outside = owner[(owner < -1) | (owner >= num_clients)]
        if outside.numel():
            raise ValueError(
                f"Client ids must be in [0, num_clients={num_clients}), or -1 for an example without an owner, "
                f"got {int(outside[0])}."
            )
        by_client = torch.argsort(owner, stable=True)
        num_unowned = int((owner == -1).sum())  # they sort to the front
        sizes = torch.bincount(owner + 1, minlength=num_clients + 1)[1:]
        return cls(by_client[num_unowned:], _offsets(sizes))

    @property
    def num_clients(self) -> int:
        """Number of clients, including those that own nothing."""
        return self.offsets.numel() - 1

    @property
    def num_assigned(self) -> int:
        """Number of examples that have an owner."""
        return self.indices.numel()

    @property
    def sizes(self) -> Tensor:
        """Examples per client, int64, shape ``(num_clients,)``."""
        return self.offsets.diff()

    def sizes_of(self, client_ids: Sequence[int]) -> list[int]:
        """Number of examples of each given client, without computing the others.

        Example:
            >>> Partition.from_lists([[4, 0], [], [2, 3, 1]]).sizes_of([2, 0])
            [3, 2]
        """
        ids = torch.as_tensor(client_ids, dtype=torch.int64)
        return (self.offsets[ids + 1] - self.offsets[ids]).tolist()

    def fingerprint(self) -> str:
        """Hash of 16 hexadecimal digits that identifies the split in a checkpoint, the same on every platform."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (torch.tensor([self.num_clients]), self.offsets, self.indices):
            digest.update(tensor.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client_id: int) -> Tensor:
        if not 0 <= client_id < self.num_clients:
            raise IndexError(f"`client_id` must be in [0, num_clients={self.num_clients}), got {client_id}.")
        return self.indices[int(self.offsets[client_id]) : int(self.offsets[client_id + 1])]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client_id] for client_id in range(self.num_clients))

    def __repr__(self) -> str:
        return f"Partition(num_clients={self.num_clients}, num_assigned={self.num_assigned})"


def _offsets(sizes: Tensor) -> Tensor:
    """Start of each row and end of the last one, from the row lengths."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def hold_out(partition: Partition, fraction: float, generator: torch.Generator) -> tuple[Partition, Partition]:
    """Split each client's examples at random into those that it trains on and those that are held out.

    A client with two examples or more has at least one of each kind; a client with a single example trains on it.

    Args:
        partition: The partition to split.
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
        return partition, Partition(partition.indices[:0], _offsets(torch.zeros_like(sizes)))
    counts = (sizes.double() * fraction).round().long().clamp(min=1).minimum((sizes - 1).clamp(min=0))
    owner = torch.arange(partition.num_clients).repeat_interleave(sizes)
    shuffled = torch.randperm(partition.num_assigned, generator=generator)
    by_client = shuffled[torch.argsort(owner[shuffled], stable=True)]  # each client's entries in random order
    place = torch.arange(partition.num_assigned) - partition.offsets[owner]
    is_held_out = torch.empty(partition.num_assigned, dtype=torch.bool)
    is_held_out[by_client] = place < counts[owner]
    training = Partition(partition.indices[~is_held_out], _offsets(sizes - counts))
    return training, Partition(partition.indices[is_held_out], _offsets(counts))


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
        if labels is None and self.needs_labels:
            raise ValueError(f"{name} splits by class; pass labels=... with one class index per example.")
        if labels is not None and labels.shape != (num_examples,):
            raise ValueError(
                f"`labels` must hold one class index per example, shape ({num_examples},), got {tuple(labels.shape)}."
            )
        if labels is not None and (labels.is_floating_point() or labels.is_complex()):
            raise ValueError(f"`labels` must be integers, got {labels.dtype}; pass class indices.")
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
