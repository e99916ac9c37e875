"""A client's batches depend on its seed and ids alone, whoever loads them."""

import itertools
import os
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from one_by_one import OneByOne
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset
from toy_models import variant

from lightning_spectral.client.batches import BatchSource, ClientData, EvaluationLoader


@pytest.fixture
def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(40.0).view(20, 2), torch.arange(20))


def client_data(dataset: Dataset[Any], key: tuple[int, int, int] = (0, 1, 2), **options: Any) -> ClientData:
    seed, *ids = key
    return ClientData(BatchSource(dataset, **options), torch.tensor([3, 5, 8, 13, 1]), 2, seed, tuple(ids))


def examples(data: ClientData, local_epoch: int = 0) -> list[int]:
    return [int(label) for (_, labels), _ in data.epoch(local_epoch) for label in labels]


def test_one_epoch_passes_every_example_of_the_client_once(dataset: TensorDataset) -> None:
    batches = list(client_data(dataset).epoch(0))
    assert [size for _, size in batches] == [2, 2, 1]
    assert sorted(examples(client_data(dataset))) == [1, 3, 5, 8, 13]
    x, y = batches[0][0]
    assert torch.equal(x[:, 0], 2.0 * y)


@pytest.mark.parametrize("make", [lambda data: data, lambda data: ConcatDataset([data])], ids=["in memory", "loaded"])
@pytest.mark.parametrize("num_examples", range(1, 10))
def test_a_short_last_batch_is_left_out_as_a_dataloader_does_but_for_the_only_one(
    num_examples: int, make: Any, dataset: TensorDataset
) -> None:
    data = ClientData(BatchSource(make(dataset)), torch.arange(num_examples), 4, 0, (), drop_last=True)
    expected = [len(labels) for _, labels in DataLoader(Subset(dataset, range(num_examples)), 4, drop_last=True)]
    batches = list(data.epoch(0))
    assert [size for _, size in batches] == (expected or [num_examples])
    assert [len(labels) for (_, labels), _ in batches] == (expected or [num_examples])


def test_what_is_left_out_changes_from_epoch_to_epoch(dataset: TensorDataset) -> None:
    data = ClientData(BatchSource(dataset), torch.arange(5), 4, 0, (), drop_last=True)
    assert len({frozenset(examples(data, epoch)) for epoch in range(20)}) > 1


def test_indexing_in_memory_gives_what_a_dataloader_gives(dataset: TensorDataset) -> None:
    fast, slow = client_data(dataset), client_data(OneByOne(dataset))
    for (ours, _), (theirs, _) in zip(fast.epoch(3), slow.epoch(3), strict=True):
        assert type(ours) is type(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_subset_of_a_subset_in_memory_is_indexed_through(dataset: TensorDataset) -> None:
    subset = Subset(Subset(dataset, [9, 8, 7, 6, 5, 4]), [5, 0, 3])
    source = BatchSource(subset)
    assert source.is_in_memory
    ((x, y),) = source.batches([torch.tensor([2, 0])])
    assert y.tolist() == [6, 4]
    assert torch.equal(x, torch.stack([subset[2][0], subset[0][0]]))
    assert not BatchSource(subset, collate_fn=list).is_in_memory


def test_order_depends_on_the_key_and_the_local_epoch_alone(dataset: TensorDataset) -> None:
    state = torch.get_rng_state()
    orders = [
        examples(client_data(dataset, key), epoch) for key in [(0, 1, 2), (1, 1, 2), (0, 2, 2)] for epoch in (0, 1)
    ]
    assert examples(client_data(dataset, (0, 1, 2)), 0) == orders[0]
    assert len({tuple(order) for order in orders}) >= 5  # 5! = 120 orders; a coincidence of two is possible
    assert torch.equal(torch.get_rng_state(), state)


def test_collate_function_and_workers_are_the_users(dataset: TensorDataset) -> None:
    data = client_data(dataset, collate_fn=lambda batch: [torch.zeros(1), torch.tensor([y for _, y in batch])])
    assert sorted(examples(data)) == [1, 3, 5, 8, 13]
    assert examples(client_data(ConcatDataset([dataset]), num_workers=1)) == examples(client_data(dataset))


def test_evaluation_loader_goes_through_the_data_in_order(dataset: TensorDataset) -> None:
    loader = EvaluationLoader(BatchSource(dataset), 20, 6)
    expected = list(DataLoader(dataset, batch_size=6))
    assert len(loader) == len(expected) == 4
    for _ in range(2):
        for ours, theirs in zip(loader, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class Noisy(Dataset[Any]):
    """Examples that draw from all global generators, and tell which process loaded them."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), np.random.rand(), float(torch.rand(()))]
        return torch.tensor([index, os.getpid(), *drawn], dtype=torch.float64)


TASKS = [[(7, [3, 1]), (8, [2])], [(9, [0, 11, 5])], [(7, [3, 1])]]


def load(num_workers: int) -> list[torch.Tensor]:
    batches = BatchSource(Noisy(), num_workers=num_workers)
    loaded = [batch[:, [0, 2, 3, 4]] for tasks in TASKS for batch in batches.load(tasks)]
    batches.close()
    return loaded


@pytest.mark.parametrize("num_workers", [1, 2])
def test_any_number_of_workers_loads_the_same(num_workers: int) -> None:
    alone, with_workers = load(0), load(num_workers)
    assert all(torch.equal(a, b) for a, b in zip(alone, with_workers, strict=True))
    assert torch.equal(alone[0], alone[3])  # the same seed and examples
    assert not torch.equal(alone[0][:, 1:], alone[0].flip(0)[:, 1:])  # the examples of a batch draw separately


def test_what_an_abandoned_client_had_asked_for_does_not_reach_the_next() -> None:
    batches = BatchSource(Noisy(), num_workers=1)
    next(batches.load([(i, [i]) for i in range(8)]))
    (batch,) = batches.load([(1, [9, 10])])
    assert batch[:, 0].tolist() == [9, 10]
    batches.close()


def test_workers_stay_from_client_to_client_until_close_and_a_later_batch_starts_others() -> None:
    batches = BatchSource(Noisy(), num_workers=1)
    first, second = ([float(one[0, 1]) for one in batches.load([(0, [1])])] for _ in range(2))
    assert first == second
    batches.close()
    with pytest.raises(ProcessLookupError, match="No such process"):
        os.kill(int(first[0]), 0)
    assert [float(one[0, 1]) for one in batches.load([(0, [1])])] != first
    batches.close()


def test_collation_draws_from_the_seed_of_its_batch() -> None:
    batches = BatchSource(Noisy(), collate_fn=lambda examples: float(torch.rand(())))
    state = torch.get_rng_state()
    first, second, again = batches.load([(0, [1]), (1, [1]), (0, [1])])
    assert first == again != second
    assert torch.equal(torch.get_rng_state(), state)


def test_a_data_set_that_loads_whole_batches_may() -> None:
    batched = variant(Noisy, __getitems__=lambda self, indices: [torch.tensor(-i) for i in indices])
    (batch,) = BatchSource(batched()).load([(0, [4, 2])])
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
    batches = BatchSource(Deadly(), num_workers=1)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches.load([(0, [1]), (1, [3])]))
    (batch,) = batches.load([(7, [2])])
    (alone,) = BatchSource(Deadly()).load([(7, [2])])
    assert torch.equal(batch[:, 2:], alone[:, 2:])
    batches.close()
