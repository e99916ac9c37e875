"""Data that worker processes read: with noise, and by row."""

import multiprocessing
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from one_by_one import Noisy

import lightning_spectral as ls


def test_workers_change_nothing_and_end_with_the_fit(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    runs = []
    for num_workers in (0, 2):
        data = ls.FederatedDataModule(Noisy(toy), ls.IIDPartitioner(12), batch_size=4, num_workers=num_workers)
        runs.append(fit(seeded(lit_mlp), data, clients_per_round=3, max_epochs=2).state)
        assert not multiprocessing.active_children()
    assert same_state(*runs)


class Table(torch.utils.data.Dataset[Any]):
    """Rows as dictionaries and columns by name, as in Hugging Face's data sets."""

    def __init__(self, **columns: torch.Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: Any) -> Any:
        return self.columns[key] if isinstance(key, str) else {n: column[key] for n, column in self.columns.items()}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_table_trains_as_its_columns_do(num_workers: int, lit_mlp: Any, toy: Any, fit: Fit) -> None:
    class LitTable(lit_mlp):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["label"]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((batch["x"], batch["label"]), batch_idx)

    rows, split = Table(x=toy.tensors[0], label=toy.tensors[1]), ls.DirichletPartitioner(num_clients=6, alpha=1.0)
    by_row = ls.FederatedDataModule(
        rows, split, val=rows, labels=rows["label"].tolist(), batch_size=4, num_workers=num_workers
    )
    in_memory = ls.FederatedDataModule(toy, split, val=toy, batch_size=4)
    assert same_state(fit(seeded(LitTable), by_row).state, fit(seeded(lit_mlp), in_memory).state)
