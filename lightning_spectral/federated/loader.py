"""One client's data as batches, in an order that only the seed, the round and the client decide."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_spectral.federated.rng import derived_generator

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, eq=False)
class BatchSource:
    """Batches of chosen examples of a data set.

    Data that lies in tensors (`torch.utils.data.TensorDataset`) is indexed directly: no DataLoader, no collation.

    Attributes:
        dataset: Any map-style data set.
        collate_fn: Joins examples to a batch; ``None`` for PyTorch's default.
        num_workers: Worker processes for data that is not in memory.
    """

    dataset: Dataset[Any]
    collate_fn: Collate | None = None
    num_workers: int = 0

    def batches(self, index_batches: Sequence[Tensor], generator: torch.Generator | None = None) -> Iterator[Any]:
        """Yield one batch for each tensor of example indices; the generator seeds the workers, if any."""
        if type(self.dataset) is TensorDataset and self.collate_fn is None:
            tensors = self.dataset.tensors
            return ([tensor[indices] for tensor in tensors] for indices in index_batches)
        sampler = [indices.tolist() for indices in index_batches]
        return iter(
            DataLoader(
                self.dataset,
                batch_sampler=sampler,
                collate_fn=self.collate_fn,
                num_workers=self.num_workers,
                generator=generator,
            )
        )


class ClientData:
    """The training data of one client in one round.

    A plain class, because Lightning converts the tensors of dataclasses that travel as batches.

    Args:
        source: Where examples come from.
        indices: The client's examples, shape ``(num_examples,)``.
        batch_size: Examples per local step; the last batch of an epoch may be smaller.
        key: ``(seed, round_idx, client_id)``: all that the order depends on.
    """

    def __init__(self, source: BatchSource, indices: Tensor, batch_size: int, key: tuple[int, int, int]) -> None:
        self.source = source
        self.indices = indices
        self.batch_size = batch_size
        self.key = key

    def epoch(self, local_epoch: int) -> Iterator[tuple[Any, int]]:
        """One shuffled pass over the client's examples: pairs of (batch, number of examples in it)."""
        seed, round_idx, client_id = self.key
        generator = derived_generator(seed, "data order", round_idx, client_id, local_epoch)
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        index_batches = torch.split(order, self.batch_size)
        batches = self.source.batches(index_batches, generator)
        return zip(batches, map(len, index_batches), strict=True)


@dataclass(frozen=True, eq=False)
class EvaluationLoader:
    """A data set in order, in batches: what Lightning validates and tests on when the data lies in memory."""

    source: BatchSource
    num_examples: int
    batch_size: int

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.source.batches(torch.split(torch.arange(self.num_examples), self.batch_size))
