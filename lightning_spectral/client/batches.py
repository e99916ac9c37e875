"""One client's data as batches, in an order determined by seed, round and client; also by worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from lightning_spectral.protocol.rng import derived_generator, derived_seed, isolated_rng

Collate = Callable[[list[Any]], Any]
Task = tuple[int, list[int]]  # a seed, and the examples of a batch


@dataclass(eq=False)
class BatchSource:
    """Batches of chosen examples of a data set, always the same ones, whoever loads them.

    Data held in tensors (a `torch.utils.data.TensorDataset`, or a `Subset` of one) is indexed directly: no
    DataLoader, no collation. Other data is loaded in this process, or in workers, which live until `close`. Everything
    that examples and collation draw from the global generators, e.g. for augmentation, is seeded batch by batch, so it
    depends neither on the number of workers nor on earlier batches.

    Example:
        >>> source = BatchSource([10, 11, 12, 13])
        >>> [batch.tolist() for batch in source.load([(0, [3, 1]), (1, [2])])]
        [[13, 11], [12]]
    """

    dataset: Dataset[Any]
    collate_fn: Collate | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        self._examples = _SeededExamples(self.dataset, self.collate_fn or default_collate)
        self._tasks: list[Task] = []  # of the workers, which stay alive when it is replaced
        self._loader: DataLoader[Any] | None = None

    @property
    def is_in_memory(self) -> bool:
        """Whether batches come from indexing tensors."""
        return self._tensors is not None

    @cached_property
    def _tensors(self) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
        return _in_memory(self.dataset) if self.collate_fn is None else None

    def batches(self, index_batches: Sequence[Tensor], seed: int = 0, ids: tuple[int | str, ...] = ()) -> Iterator[Any]:
        """Yield one batch for each tensor of example indices.

        Args:
            index_batches: The examples of each batch, in order.
            seed: The run's seed.
            ids: Identify the client's batches; with ``seed``, they determine every random draw of the examples.
        """
        if self._tensors is not None:
            tensors, subset = self._tensors
            chosen = index_batches if subset is None else [subset[indices] for indices in index_batches]
            return ([tensor[indices] for tensor in tensors] for indices in chosen)
        seeds = (derived_seed(seed, "examples", *ids, batch_idx) for batch_idx in range(len(index_batches)))
        return self.load(list(zip(seeds, (one.tolist() for one in index_batches), strict=True)))

    def load(self, tasks: Sequence[Task]) -> Iterator[Any]:
        """One batch for each task, in order. With workers, finish or drop one iterator before asking for another.

        After an error, which may mean that a worker has died, other workers load what is asked for next.
        """
        if self.num_workers == 0:
            yield from map(self._examples.__getitems__, tasks)
            return
        self._tasks[:] = tasks
        self._loader = self._loader or self._new_loader()
        try:
            batches = iter(self._loader)
        except RuntimeError:  # from torch: a worker has died since the last task
            self._loader = self._new_loader()
            batches = iter(self._loader)
        try:
            yield from batches
        except Exception:
            self.close()
            raise

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._examples,
            batch_sampler=self._tasks,  # type: ignore[arg-type]
            collate_fn=unchanged,
            num_workers=self.num_workers,
            persistent_workers=True,
            generator=torch.Generator(),  # otherwise the loader draws an unused seed from the client's generator
        )

    def close(self) -> None:
        """Stop the workers; a later batch starts new ones."""
        self._loader = None


@dataclass(frozen=True, eq=False)
class _SeededExamples(Dataset[Any]):
    dataset: Dataset[Any]
    collate: Collate

    def __getitems__(self, task: Task) -> Any:
        """The batch of a task; a DataLoader calls this method to get several examples at once."""
        seed, indices = task
        with isolated_rng(seed):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(indices))
            return self.collate([self.dataset[i] for i in indices])


def unchanged(batch: Any, *_: Any) -> Any:
    """Return a batch as it is."""
    return batch


def _in_memory(dataset: Dataset[Any]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors of a data set, and its rows of them or ``None`` for all; ``None`` for any other class or subclass."""
    if type(dataset) is TensorDataset:
        return dataset.tensors, None
    if type(dataset) is Subset and (inner := _in_memory(dataset.dataset)) is not None:
        tensors, outer = inner
        indices = torch.as_tensor(dataset.indices)
        return tensors, indices if outer is None else outer[indices]
    return None


@dataclass(eq=False, repr=False)
class ClientData:
    """The training data of one client in one round.

    Args:
        source: Where examples come from.
        indices: The client's examples, shape ``(num_examples,)``.
        batch_size: Examples per local step; the last batch of an epoch may be smaller.
        seed: The run's seed.
        ids: The round and the unit; with ``seed``, they determine the order.
        drop_last: Whether an epoch omits its last batch if that is smaller, unless it is the only one.
        labels: Returns the class of each example of the source, int64, for hooks that need the client's classes;
            ``None`` if classes are not known.
    """

    source: BatchSource
    indices: Tensor
    batch_size: int
    seed: int
    ids: tuple[int | str, ...]
    drop_last: bool = False
    labels: Callable[[], Tensor] | None = None

    def __post_init__(self) -> None:
        self.num_examples = examples_per_epoch(len(self.indices), self.batch_size, self.drop_last)
        self.num_batches = -(-self.num_examples // self.batch_size)

    @property
    def round_idx(self) -> int:
        """The round in which the client trains, counted from 0."""
        return int(self.ids[0])

    def classes(self) -> Tensor:
        """The classes of the client's examples, ascending, int64, shape ``(num_classes,)``."""
        return self.class_counts[0]

    @cached_property
    def class_counts(self) -> tuple[Tensor, Tensor]:
        """The same classes, and the number of examples of each, int64."""
        if self.labels is None:
            raise ValueError("The classes of this client's examples are not known; give ClientData(..., labels=...).")
        counted: tuple[Tensor, Tensor] = torch.unique(self.labels()[self.indices], return_counts=True)
        return counted

    def loader(self) -> DataLoader[Any]:
        """The client's examples in the order of the data set, in batches, for code that reads them besides training."""
        examples = Subset(self.source.dataset, self.indices.tolist())
        return DataLoader(examples, self.batch_size, collate_fn=self.source.collate_fn, drop_last=self.drop_last)

    def epoch(self, local_epoch: int) -> Iterator[tuple[Any, int]]:
        """Make one shuffled pass over the client's examples: pairs of (batch, number of examples in it).

        The examples that `drop_last` omits differ from epoch to epoch.
        """
        ids = (*self.ids, local_epoch)
        generator = derived_generator(self.seed, "data order", *ids)
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        index_batches = torch.split(order[: self.num_examples], self.batch_size)
        batches = self.source.batches(index_batches, self.seed, ids)
        return zip(batches, map(torch.numel, index_batches), strict=True)


def examples_per_epoch(num_examples: int, batch_size: int, drop_last: bool) -> int:
    """Return the number of examples that a client trains on in a local epoch.

    A client with less than one batch trains on all examples, even with ``drop_last``; otherwise it would never train.

    Example:
        >>> examples_per_epoch(11, 4, drop_last=False), examples_per_epoch(11, 4, drop_last=True)
        (11, 8)
        >>> examples_per_epoch(3, 4, drop_last=True)
        3
    """
    whole = num_examples - num_examples % batch_size
    return whole if drop_last and whole else num_examples


@dataclass(frozen=True, eq=False)
class EvaluationLoader:
    """Iterates over an in-memory data set in order, in batches, for validation and testing."""

    source: BatchSource
    num_examples: int
    batch_size: int

    def __len__(self) -> int:
        return -(-self.num_examples // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        return self.source.batches(torch.split(torch.arange(self.num_examples), self.batch_size))
