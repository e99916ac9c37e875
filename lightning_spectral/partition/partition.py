"""The partition of a data set's examples among clients, its report, and the partitioners that read no labels."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.errors import from_extra, refuse_moved
from lightning_spectral.partition.sizes import Sizes, check_sizes, client_shares
from lightning_spectral.tables import Block, Tabular

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Keys = Sequence[Hashable] | Tensor | npt.NDArray[np.generic]
CALLED = MappingProxyType(  # names from elsewhere, and sizes, which only two partitioners take
    {
        "num_partitions": "num_clients=10, which NaturalPartitioner counts",
        "partition_by": "NaturalPartitioner(table['user']) for a column of clients; labels are read from the data set",
        "num_classes_per_partition": "LabelsPerClient(num_clients=10, num_labels=2)",
        "sizes": "IIDPartitioner(num_clients=10, sizes=[...]), or DirichletPartitioner, which has labels unequal too",
    }
)
_ROWS, _BARS, _NAMED = 10, 100, 40  # clients in the table of a report, in its picture, and there with names


@dataclass(frozen=True, eq=False, repr=False)
class Partition:
    """Examples of every client, in compressed sparse row form: two tensors, for any number of clients.

    ``partition[client_id]`` is a view of shape ``(sizes[client_id],)``; iterating gives the clients in order.
    Examples owned by no client are absent.

    Attributes:
        indices: Example indices, one client after another, int64, shape ``(num_assigned,)``, on the CPU.
        offsets: Client c owns ``indices[offsets[c]:offsets[c + 1]]``, int64, shape ``(num_clients + 1,)``.
        names: Name of each client; empty if clients have only numbers.

    Example:
        >>> partition = Partition.from_lists([[4, 0], [], [2, 3, 1]])
        >>> partition[2], partition.sizes
        (tensor([2, 3, 1]), tensor([2, 0, 3]))
        >>> partition
        Partition(num_clients=3, num_assigned=5)
    """

    indices: Tensor
    offsets: Tensor
    names: Sequence[str] = ()

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
        if (outside := owner[(owner < -1) | (owner >= num_clients)]).numel():
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

    @cached_property
    def fingerprint(self) -> str:
        """Hash of 16 hexadecimal digits that identifies the split in a checkpoint, the same on every platform."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (torch.tensor([self.num_clients]), self.offsets, self.indices):
            digest.update(tensor.numpy().astype("<i8").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client_id: int) -> Tensor:
        if not 0 <= client_id < self.num_clients:
            raise IndexError(f"`client_id` must be in [0, num_clients={self.num_clients}), got {client_id}.")
        return self.indices[slice(*self.offsets[client_id : client_id + 2].tolist())]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[client_id] for client_id in range(self.num_clients))

    def __repr__(self) -> str:
        return f"Partition(num_clients={self.num_clients}, num_assigned={self.num_assigned})"


def _offsets(sizes: Tensor) -> Tensor:
    """Start of each row and end of the last one, from the row lengths."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def hold_out(
    partition: Partition, fraction: float, generator: torch.Generator, labels: Tensor | None = None
) -> tuple[Partition, Partition]:
    """Split each client's examples at random into those that it trains on and those that are held out.

    A client with two examples or more has at least one of each kind; a client with a single example trains on it.

    Args:
        partition: The partition to split.
        fraction: Share to hold out, in ``[0, 1)``, rounded to whole examples client by client.
        generator: CPU generator, the only source of randomness; not drawn from if ``fraction`` is 0.
        labels: Class of each example of the data set; if given, every class of a client is held out in the same
            proportion, rounded up or down.

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
        return partition, replace(partition, indices=partition.indices[:0], offsets=_offsets(torch.zeros_like(sizes)))
    counts = (sizes.double() * fraction).round().long().clamp(min=1).minimum((sizes - 1).clamp(min=0))
    owner = torch.arange(partition.num_clients).repeat_interleave(sizes)
    shuffled = torch.randperm(partition.num_assigned, generator=generator)
    if labels is not None:
        shuffled = shuffled[labels[partition.indices[shuffled]].argsort(stable=True)]
    by_client = shuffled[torch.argsort(owner[shuffled], stable=True)]  # each client's entries in random order, by class
    place = torch.arange(partition.num_assigned) - partition.offsets[owner]
    is_held_out = torch.empty(partition.num_assigned, dtype=torch.bool)
    is_held_out[by_client] = place < counts[owner]
    if labels is not None:  # at equal steps, from a place that is drawn for each client
        place += (torch.rand(partition.num_clients, generator=generator) * sizes).long()[owner]
        passed = torch.stack([place, place + 1]) * counts[owner] // sizes[owner]
        is_held_out[by_client] = passed[0] < passed[1]
    training = replace(partition, indices=partition.indices[~is_held_out], offsets=_offsets(sizes - counts))
    return training, replace(partition, indices=partition.indices[is_held_out], offsets=_offsets(counts))


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

    def __new__(cls, *args: Any, **options: Any) -> "Partitioner":
        """Say how an argument is called here."""
        refuse_moved(cls, options, CALLED)
        return super().__new__(cls)

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


def check_one_per_example(argument: str, entries: Any) -> None:
    """Raise ``TypeError`` for entries without an order: a mapping would be read as its keys, a text as its letters."""
    if isinstance(entries, str):
        remedy = f"; if it is a column, write {argument}=table[{entries!r}]"
        raise TypeError(f"`{argument}` must list one entry per example, got {entries!r}{remedy}.")
    if isinstance(entries, Mapping | set | frozenset | type) or not isinstance(entries, Collection):
        shown = f"a {type(entries).__name__}" if isinstance(entries, Mapping | set | frozenset) else repr(entries)
        raise TypeError(f"`{argument}` must list one entry per example, in the order of the data set, got {shown}.")


@dataclass(frozen=True)
class IIDPartitioner(Partitioner):
    """Shares of a random permutation; every example is used, and labels are ignored.

    Args:
        num_clients: Number of clients, at least 1.
        sizes: How much each client has: a positive number for each, in any unit, since only ratios count; or a
            `SizeLaw`. Each client has at least one example. ``None`` for equal sizes, which differ by at most one.

    Example:
        >>> draw = torch.Generator().manual_seed(0)
        >>> sorted(IIDPartitioner(num_clients=4)(10, None, draw).sizes.tolist())
        [2, 2, 3, 3]
        >>> IIDPartitioner(num_clients=3, sizes=[24, 180, 36])(240, None, draw).sizes
        tensor([ 24, 180,  36])
    """

    num_clients: int
    sizes: Sizes = None

    def __post_init__(self) -> None:
        check_fields(self, num_clients=Whole(at_least=1), sizes=partial(check_sizes, num_clients=self.num_clients))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        order, sizes = client_shares(self.sizes, num_examples, self.num_clients, generator)
        place = torch.randperm(num_examples, generator=generator).argsort()
        return Partition.from_assignment(order.repeat_interleave(sizes)[place], self.num_clients)


@dataclass(frozen=True, eq=False)
class NaturalPartitioner(Partitioner):
    """One client per distinct key; every example is used and nothing is drawn.

    Clients are numbered in the order in which their keys first appear, which works even for keys that cannot be sorted.
    Labels and generator are ignored.

    Args:
        keys: Key of each example, shape ``(num_examples,)``: hashable objects, a tensor or an array.
        names: Keys of all clients, in the order of their ids, for several data sets with the same clients; a client
            whose key does not occur has no examples. By default the keys that occur.

    Attributes:
        num_clients: Number of clients.
        client_names: Key of each client, by client id.
        client_of_example: Client id of each example, int64, shape ``(num_examples,)``.

    Example:
        >>> partitioner = NaturalPartitioner(["romeo", "juliet", "romeo", "nurse"])
        >>> partitioner.client_names
        ('romeo', 'juliet', 'nurse')
        >>> list(partitioner(4, None, torch.Generator()))
        [tensor([0, 2]), tensor([1]), tensor([3])]
        >>> list(NaturalPartitioner(["nurse", "romeo"], names=["romeo", "juliet", "nurse"]).client_of_example)
        [tensor(2), tensor(0)]
    """

    keys: InitVar[Keys]
    names: InitVar[Sequence[Hashable] | None] = None
    num_clients: int = field(init=False)
    client_names: tuple[Hashable, ...] = field(init=False, repr=False)
    client_of_example: Tensor = field(init=False, repr=False)

    def __post_init__(self, keys: Keys, names: Sequence[Hashable] | None) -> None:
        found = _as_objects(keys)
        if isinstance(names, str | Mapping | set) or not isinstance(names, Iterable | None):
            raise TypeError(f"`names` must list the keys of all clients, got {names!r}.")
        client_of_key = {key: client for client, key in enumerate(dict.fromkeys(found if names is None else names))}
        if names is not None:
            if len(client_of_key) < len(names):
                twice = next(name for index, name in enumerate(names) if name in names[:index])
                raise ValueError(f"`names` must be distinct, got {twice!r} twice.")
            if unknown := set(found) - client_of_key.keys():
                raise ValueError(f"{len(unknown)} keys are not among `names`, e.g. {next(iter(unknown))!r}; add them.")
        owner = torch.tensor([client_of_key[key] for key in found], dtype=torch.int64)
        names = tuple(client_of_key)  # by `vars`, since the fields are frozen
        vars(self).update(num_clients=len(names), client_names=names, client_of_example=owner)

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        if (number := len(self.client_of_example)) != num_examples:
            raise ValueError(f"`keys` must hold one key per example ({num_examples}), got {number}.")
        names = () if self.client_names == tuple(range(self.num_clients)) else tuple(map(str, self.client_names))
        return replace(Partition.from_assignment(self.client_of_example, self.num_clients), names=names)


def _as_objects(keys: Keys) -> Sequence[Hashable]:
    """Keys as Python objects that are equal when their values are."""
    check_one_per_example("keys", keys)
    if isinstance(keys, Tensor | np.ndarray):
        if keys.ndim != 1:
            raise ValueError(f"`keys` must be one-dimensional, got shape {tuple(keys.shape)}.")
        keys = keys.tolist()
    if not len(keys):
        raise ValueError("`keys` must hold at least one key, got none.")
    # tensors are hashed by identity, so a list of them would make every example a separate client; so would NaN
    odd = next((key for key in keys if not isinstance(key, Hashable) or isinstance(key, Tensor) or key != key), None)
    if odd is not None:
        raise ValueError(f"Keys must be hashable by value, got {odd!r}; pass a tensor, an array, or plain keys.")
    return keys


@dataclass(frozen=True, eq=False)
class PartitionReport(Tabular):
    """Sizes and class mixtures of the clients; ``print`` it or :meth:`plot` it.

    Attributes:
        counts: Examples per client, int64, shape ``(num_clients,)``.
        histogram: Examples per client and class, int64, shape ``(num_clients, num_classes)``; ``None`` without labels.
        classes: Label of each column of ``histogram``, ascending, shape ``(num_classes,)``; ``None`` without labels.
        names: Name of each client; empty if clients have only numbers.

    Example:
        >>> partition = Partition.from_lists([[0, 1], [2, 3, 4]])
        >>> print(report(partition, torch.tensor([0, 1, 1, 1, 2])))
        2 clients, 5 examples; 2 / 2.5 / 3 examples per client (min / median / max)
        of 3 classes, a client has 2.0 on average, 2.0 above a 5 % share
        <BLANKLINE>
        client  examples  classes
        0       2         0: 1, 1: 1
        1       3         1: 2, 2: 1
    """

    counts: Tensor
    histogram: Tensor | None
    classes: Tensor | None
    names: Sequence[str] = ()

    def mean_classes(self, min_share: float = 0.0) -> float:
        """Number of classes with more than a given share of a client's examples, averaged over the clients.

        By default it counts the classes that are present; a client without examples has none.

        Example:
            >>> report(Partition.from_lists([[0, 1], [2]]), torch.tensor([0, 1, 1])).mean_classes()
            1.5
        """
        if self.histogram is None:
            raise ValueError("The report was made without labels; pass labels=... to `report`.")
        return float((self.histogram > min_share * self.counts[:, None]).sum(1).double().mean())

    def plot(self, path_or_ax: "str | os.PathLike[str] | Axes") -> "Axes":
        """Plot stacked bars, one per client (the first 100), a colour per class, to a file or on given axes."""
        if isinstance(path_or_ax, str | os.PathLike):
            with from_extra("examples"):
                from matplotlib.figure import Figure  # not pyplot, which would choose a backend for the process

            figure = Figure(figsize=(8, 3), layout="constrained")
            axes = self.plot(figure.subplots())
            figure.savefig(path_or_ax)
            return axes
        axes, shown = path_or_ax, self.counts[:_BARS]
        bottom, columns = torch.zeros_like(shown), [("examples", self.counts)]
        if self.histogram is not None and self.classes is not None:
            columns = list(zip(map(str, self.classes.tolist()), self.histogram.T, strict=True))
        for label, column in columns:
            axes.bar(range(len(shown)), column[:_BARS].numpy(), bottom=bottom.numpy(), width=1.0, label=label)
            bottom = bottom + column[:_BARS]
        axes.set(xlabel="client", ylabel="examples", xlim=(-0.5, len(shown) - 0.5))
        if self.names and len(shown) <= _NAMED:
            axes.set_xticks(range(len(shown)), self.names, rotation=45, ha="right")
        if self.histogram is not None and self.histogram.shape[1] <= 20:
            axes.legend(title="class", fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
        return axes

    def _blocks(self) -> list[Block]:
        """A summary, a table, and how many clients it does not show."""
        sizes = self.counts.double()
        low, middle, high = sizes.min(), sizes.quantile(0.5), sizes.max()
        lines = [
            f"{len(self.counts)} clients, {int(self.counts.sum())} examples; "
            f"{low:g} / {middle:g} / {high:g} examples per client (min / median / max)"
        ]
        if self.histogram is not None:
            lines.append(
                f"of {self.histogram.shape[1]} classes, a client has {self.mean_classes():.1f} on average, "
                f"{self.mean_classes(0.05):.1f} above a 5 % share"
            )
        classes = ["classes"] * (self.histogram is not None)
        rows: list[tuple[str, ...]] = [("client", *["name"] * bool(self.names), "examples", *classes)]
        for client, size in enumerate(self.counts[:_ROWS].tolist()):
            rows.append((str(client), *self.names[client : client + 1], str(size), *self._mixture(client)))
        hidden = len(self.counts) - _ROWS
        return ["\n".join(lines), rows, *[f"... and {hidden} more clients"] * (hidden > 0)]

    def _mixture(self, client: int) -> list[str]:
        """The client's classes in one entry, the most frequent first; none without labels."""
        if self.histogram is None or self.classes is None:
            return []
        counts, columns = self.histogram[client].sort(descending=True, stable=True)
        present = [f"{self.classes[k]}: {n}" for n, k in zip(counts.tolist(), columns, strict=True) if n]
        return [", ".join(present[:6]) + (", ..." if len(present) > 6 else "")]


def report(partition: Partition, labels: Tensor | None = None) -> PartitionReport:
    """Count each client's examples, by class if labels are given.

    Args:
        partition: The split.
        labels: Class of each example of the whole data set, integers, shape ``(num_examples,)``.

    Example:
        >>> report(Partition.from_lists([[0, 1], [2]])).counts
        tensor([2, 1])
    """
    if labels is None:
        return PartitionReport(partition.sizes, None, None, partition.names)
    num_needed = int(partition.indices.max()) + 1 if partition.num_assigned else 0
    if labels.ndim != 1 or len(labels) < num_needed:
        raise ValueError(
            f"`labels` must hold one class index per example (at least {num_needed}), got shape {tuple(labels.shape)}."
        )
    values, inverse = np.unique(labels.cpu().numpy(), return_inverse=True)
    client = torch.arange(partition.num_clients).repeat_interleave(partition.sizes)
    cell = client * len(values) + torch.from_numpy(inverse)[partition.indices]
    histogram = cell.bincount(minlength=partition.num_clients * len(values)).view(partition.num_clients, -1)
    return PartitionReport(partition.sizes, histogram, torch.from_numpy(values), partition.names)
