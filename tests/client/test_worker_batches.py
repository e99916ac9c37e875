import itertools
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_spectral.client.batches import BatchSource, ClientData, WorkerBatches


class Noisy(Dataset[Any]):
    """Examples that draw from all global generators, and tell which process loaded them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([index, os.getpid(), *drawn], dtype=torch.float64)


TASKS = [[(7, [3, 1]), (8, [2])], [(9, [0, 11, 5])], [(7, [3, 1])]]


def load(num_workers: int) -> tuple[list[torch.Tensor], set[float]]:
    batches = WorkerBatches(Noisy(), num_workers=num_workers)
    loaded = [batch for tasks in TASKS for batch in batches.load(tasks)]
    batches.close()
    return [batch[:, [0, 2, 3, 4]] for batch in loaded], {float(pid) for batch in loaded for pid in batch[:, 1]}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_loads_the_same(num_workers: int) -> None:
    alone, with_workers = load(0)[0], load(num_workers)[0]
    assert all(torch.equal(a, b) for a, b in zip(alone, with_workers, strict=True))
    assert torch.equal(alone[0], alone[3])  # the same seed and examples
    assert not torch.equal(alone[0][:, 1:], alone[0].flip(0)[:, 1:])  # the examples of a batch draw separately


def test_workers_stay_from_client_to_client() -> None:
    _, pids = load(1)
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_what_an_abandoned_client_had_asked_for_does_not_reach_the_next() -> None:
    batches = WorkerBatches(Noisy(), num_workers=1)
    next(batches.load([(i, [i]) for i in range(8)]))
    (batch,) = batches.load([(1, [9, 10])])
    assert batch[:, 0].tolist() == [9, 10]
    batches.close()


def test_close_ends_the_workers_and_a_later_batch_starts_others() -> None:
    batches = WorkerBatches(Noisy(), num_workers=1)
    first, second = ([float(one[0, 1]) for one in batches.load([(0, [1])])] for _ in range(2))
    assert first == second
    batches.close()
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(int(first[0]), 0)
    assert [float(one[0, 1]) for one in batches.load([(0, [1])])] != first
    batches.close()


def test_collation_draws_from_the_seed_of_its_batch() -> None:
    batches = WorkerBatches(Noisy(), collate_fn=lambda examples: float(torch.rand(())))
    state = torch.get_rng_state()
    first, second, again = batches.load([(0, [1]), (1, [1]), (0, [1])])
    assert first == again != second
    assert torch.equal(torch.get_rng_state(), state)


def test_a_data_set_that_loads_whole_batches_may() -> None:
    class Batched(Noisy):
        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            return [torch.tensor(-i) for i in indices]

    (batch,) = WorkerBatches(Batched()).load([(0, [4, 2])])
    assert batch.tolist() == [-4, -2]


def test_every_client_round_and_epoch_draws_its_own() -> None:
    source = BatchSource(Noisy())
    keys = itertools.product([0, 1], [0, 1], [0, 1])
    drawn = [
        float(batch[0, 4])
        for seed, *ids in keys
        for epoch in (0, 1)
        for batch, _ in ClientData(source, torch.arange(4), 2, seed, tuple(ids)).epoch(epoch)
    ]
    assert len(set(drawn)) == len(drawn) == 32


class Deadly(Noisy):
    """One example kills the worker that loads it, as the system does when memory runs out."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_worker_that_died_is_replaced_for_the_next_client() -> None:
    batches = WorkerBatches(Deadly(), num_workers=1)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches.load([(0, [1]), (1, [3])]))
    (batch,) = batches.load([(7, [2])])
    (alone,) = WorkerBatches(Deadly()).load([(7, [2])])
    assert torch.equal(batch[:, 2:], alone[:, 2:])
    batches.close()
