"""Partitioners that ignore labels: equal shares at random, and clients that the data set itself has."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.partition.partition import Partition, Partitioner, check_one_per_example, equal_shares

Keys = Sequence[Hashable] | Tensor | npt.NDArray[np.generic]


@dataclass(frozen=True)
class IIDPartitioner(Partitioner):
    """Equal shares of a random permutation: sizes differ by at most one and every example is used.

    Labels are ignored. The clients that get an extra example are drawn at random.

    Args:
        num_clients: Number of clients, at least 1.

    Example:
        >>> partition = IIDPartitioner(num_clients=4)(10, None, torch.Generator().manual_seed(0))
        >>> sorted(partition.sizes.tolist())
        [2, 2, 3, 3]
    """

    num_clients: int

    def __post_init__(self) -> None:
        check_fields(self, num_clients=Whole(at_least=1))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        order, sizes = equal_shares(num_examples, self.num_clients, generator)
        client_of_example = torch.empty(num_examples, dtype=torch.int64)
        client_of_example[torch.randperm(num_examples, generator=generator)] = order.repeat_interleave(sizes)
        return Partition.from_assignment(client_of_example, self.num_clients)


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
            _check_names(names, found)
        clients = [client_of_key[key] for key in found]
        # the way to set fields of a frozen dataclass
        object.__setattr__(self, "num_clients", len(client_of_key))
        object.__setattr__(self, "client_names", tuple(client_of_key))
        object.__setattr__(self, "client_of_example", torch.tensor(clients, dtype=torch.int64))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        if self.client_of_example.numel() != num_examples:
            raise ValueError(
                f"`keys` must hold one key per example ({num_examples}), got {self.client_of_example.numel()}."
            )
        return Partition.from_assignment(self.client_of_example, self.num_clients)


def _check_names(names: Sequence[Hashable], keys: Sequence[Hashable]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for index, name in enumerate(names) if name in names[:index])
        raise ValueError(f"`names` must be distinct, got {twice!r} twice.")
    if unknown := set(keys) - set(names):
        raise ValueError(f"{len(unknown)} keys are not among `names`, e.g. {next(iter(unknown))!r}; add them.")


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
    odd = next((key for key in keys if isinstance(key, Tensor) or key != key), None)
    if odd is not None:
        raise ValueError(f"Keys must be hashable by value, got {odd!r}; pass a tensor, an array, or plain keys.")
    return keys
