"""Clients with few labels: shards of examples sorted by label, or exactly so many labels for each client."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightning_spectral.arguments import Whole, check_fields
from lightning_spectral.partition.labels import by_class
from lightning_spectral.partition.partition import Partition, Partitioner


@dataclass(frozen=True)
class ShardPartitioner(Partitioner):
    """Each client gets some of the equal shards into which all examples, sorted by label, are cut.

    Args:
        num_clients: Number of clients, at least 1.
        shards_per_client: Shards of each client, drawn at random; most have one label, those across a border two.

    Reference:
        McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data, section 3.

    Example:
        >>> labels = torch.arange(10).repeat(100)
        >>> partition = ShardPartitioner(num_clients=20)(1000, labels, torch.Generator())
        >>> {len(labels[own].unique()) for own in partition}
        {1, 2}
    """

    num_clients: int
    shards_per_client: int = 2

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, num_clients=Whole(at_least=1), shards_per_client=Whole(at_least=1))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        assert labels is not None, "__call__ checks it"
        if (num_shards := self.num_clients * self.shards_per_client) > num_examples:
            raise ValueError(f"{self} cuts {num_shards} shards, got {num_examples} examples; lower its numbers.")
        client_of_shard = torch.randperm(num_shards, generator=generator) // self.shards_per_client
        place = by_class(labels, generator).argsort()
        return Partition.from_assignment(client_of_shard[place * num_shards // num_examples], self.num_clients)


@dataclass(frozen=True)
class LabelsPerClient(Partitioner):
    """Each client has examples of exactly so many labels, and each label is dealt evenly to the clients that have it.

    One after another, clients choose at random among the labels that the fewest have chosen.

    Args:
        num_clients: Number of clients, at least 1.
        num_labels: Number of labels of each client, from 1 to that of all labels.

    Example:
        >>> labels = torch.arange(10).repeat(100)
        >>> partition = LabelsPerClient(20, num_labels=3)(1000, labels, torch.Generator())
        >>> {len(labels[own].unique()) for own in partition}
        {3}
    """

    num_clients: int
    num_labels: int = 2

    needs_labels: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self, num_clients=Whole(at_least=1), num_labels=Whole(at_least=1))

    def split(self, num_examples: int, labels: Tensor | None, generator: torch.Generator) -> Partition:
        assert labels is not None, "__call__ checks it"
        sizes = torch.unique(labels.cpu(), return_counts=True)[1].tolist()
        if not self.num_labels <= len(sizes) <= self.num_clients * self.num_labels:
            rule = f"at most {len(sizes)}, the number of labels, and `num_clients` times `num_labels` at least that"
            raise ValueError(f"`num_labels` must be {rule}; got {self}.")
        chosen_by: list[list[int]] = [[] for _ in sizes]
        for client in torch.randperm(self.num_clients, generator=generator).tolist():
            ties = torch.randperm(len(sizes), generator=generator).tolist()
            for label in sorted(ties, key=lambda label: len(chosen_by[label]))[: self.num_labels]:
                chosen_by[label].append(client)
        client_of_example = torch.empty(num_examples, dtype=torch.int64)
        for examples, clients in zip(torch.split(by_class(labels, generator), sizes), chosen_by, strict=True):
            if len(clients) > len(examples):
                what = f"{len(examples)} examples of a label to {len(clients)} clients"
                raise ValueError(f"{self} cannot deal {what}; lower its numbers, or add data.")
            client_of_example[examples] = torch.tensor(clients)[torch.arange(len(examples)) % len(clients)]
        return Partition.from_assignment(client_of_example, self.num_clients)
