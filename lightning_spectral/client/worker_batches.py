"""Batches of data that is not in memory, loaded by worker processes that stay alive from client to client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_spectral.protocol.rng import isolated_rng

Collate = Callable[[list[Any]], Any]
Task = tuple[int, list[int]]  # a seed, and the examples of a batch


class WorkerBatches:
    """Loads batches of a data set, in this process or in workers, always with the same result.

    Everything that examples and collation draw from the global generators, e.g. for augmentation, is seeded batch by
    batch, so it depends neither on the number of workers nor on earlier batches.

    Args:
        dataset: Any map-style data set.
        collate_fn: Merges examples into a batch; ``None`` for PyTorch's default.
        num_workers: Worker processes; they start with the first batch and end with `close`.

    Example:
        >>> batches = WorkerBatches([10, 11, 12, 13])
        >>> [batch.tolist() for batch in batches.load([(0, [3, 1]), (1, [2])])]
        [[13, 11], [12]]
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate | None = None, num_workers: int = 0) -> None:
        self._examples = _SeededExamples(dataset, collate_fn or default_collate)
        self._num_workers = num_workers
        self._tasks = _Tasks()
        self._loader: DataLoader[Any] | None = None

    def load(self, tasks: Sequence[Task]) -> Iterator[Any]:
        """One batch for each task, in order. With workers, finish or drop one iterator before asking for another.

        After an error, which may mean that a worker has died, other workers load what is asked for next.
        """
        if self._num_workers == 0:
            return map(self._examples.__getitems__, tasks)
        self._tasks.current = tasks
        return self._closing_after_errors(self._from_workers())

    def _from_workers(self) -> Iterator[Any]:
        """Set the workers to work; those of which one has died since the last task are replaced."""
        self._loader = self._loader or self._new_loader()
        try:
            return iter(self._loader)
        except RuntimeError:  # from torch, about the worker
            self._loader = self._new_loader()
            return iter(self._loader)

    def _new_loader(self) -> DataLoader[Any]:
        return DataLoader(
            self._examples,
            batch_sampler=self._tasks,  # type: ignore[arg-type]
            collate_fn=_identity,
            num_workers=self._num_workers,
            persistent_workers=True,
            generator=torch.Generator(),  # otherwise the loader draws an unused seed from the client's generator
        )

    def _closing_after_errors(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Stop the workers; a later batch starts new ones."""
        self._loader = None


class _SeededExamples(Dataset[Any]):
    def __init__(self, dataset: Dataset[Any], collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate

    def __getitems__(self, task: Task) -> Any:
        """The batch of a task; a DataLoader calls this method to get several examples at once."""
        seed, indices = task
        with isolated_rng(seed):
            if hasattr(self.dataset, "__getitems__"):
                return self.collate(self.dataset.__getitems__(indices))
            return self.collate([self.dataset[i] for i in indices])


class _Tasks:
    """A batch sampler whose batches are replaced between epochs, while the workers stay alive."""

    current: Sequence[Task] = ()

    def __iter__(self) -> Iterator[Task]:
        return iter(self.current)

    def __len__(self) -> int:
        return len(self.current)


def _identity(batch: Any) -> Any:
    return batch
