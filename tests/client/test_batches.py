from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

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
    assert data.num_batches == len(batches)


def test_what_is_left_out_changes_from_epoch_to_epoch(dataset: TensorDataset) -> None:
    data = ClientData(BatchSource(dataset), torch.arange(5), 4, 0, (), drop_last=True)
    assert len({frozenset(examples(data, epoch)) for epoch in range(20)}) > 1


def test_indexing_in_memory_gives_what_a_dataloader_gives(dataset: TensorDataset) -> None:
    class Hidden(Dataset[Any]):
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, index: int) -> Any:
            return dataset[index]

    fast, slow = client_data(dataset), client_data(Hidden())
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
    slow = ConcatDataset([dataset])
    assert examples(client_data(slow, num_workers=1)) == examples(client_data(dataset))


def test_evaluation_loader_goes_through_the_data_in_order(dataset: TensorDataset) -> None:
    loader = EvaluationLoader(BatchSource(dataset), 20, 6)
    expected = list(DataLoader(dataset, batch_size=6))
    assert len(loader) == len(expected) == 4
    for _ in range(2):
        for ours, theirs in zip(loader, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
