"""Clients' batches: a last one of one example, with which BatchNorm cannot train, and data that workers read."""

import copy
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from observed_runs import acting
from one_by_one import Noisy, OneByOne
from torch import nn
from torch.utils.data import TensorDataset
from toy_models import variant

import lightning_spectral as ls

SIZES = (9, 5, 2, 4)  # in batches of 4: short last batches of one, one, two and none


def uneven(toy: TensorDataset, in_memory: bool = True, **options: Any) -> ls.FederatedDataModule:
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    few = TensorDataset(*(tensor[: len(owners)] for tensor in toy.tensors))
    return ls.FederatedDataModule(
        few if in_memory else OneByOne(few), ls.NaturalPartitioner(owners), batch_size=4, **options
    )


@pytest.fixture
def with_batch_norm(lit_mlp: Any) -> Any:
    lit = seeded(lit_mlp)
    lit.net.insert(1, nn.BatchNorm1d(12))
    return lit


def test_batch_norm_on_one_example_is_an_error(with_batch_norm: Any, toy: TensorDataset, fit: Fit) -> None:
    with pytest.raises(ls.ClientError, match=r"client [01], local .*one example: leave such .* drop_last=True\)"):
        fit(with_batch_norm, uneven(toy))


@pytest.mark.parametrize("options", [{}, {"in_memory": False}, {"in_memory": False, "num_workers": 1}], ids=repr)
def test_every_client_trains_without_short_last_batches(
    options: dict[str, Any], with_batch_norm: Any, toy: TensorDataset, fit: Fit
) -> None:
    steps: dict[int, int] = {}

    count = acting(
        on_round_end=lambda _, __, summary: steps.update({c.client_id: c.num_steps for c in summary.clients})
    )
    data = uneven(toy, drop_last=True, **options)
    found = fit(with_batch_norm, data, callbacks=[count], local_epochs=3)
    assert steps == {0: 6, 1: 3, 2: 3, 3: 3}
    assert found.rows[0]["fl/examples"] == sum(SIZES)  # weights still count all examples


@pytest.mark.parametrize(("drop_last", "examples"), [(False, 9), (True, 8)])
def test_the_clock_predicts_what_is_trained(drop_last: bool, examples: int, lit: Any, toy: Any, fit: Fit) -> None:
    clock = ls.VirtualClock(ls.simulation.DeviceProfile(1e12, 1e12, 30.0), macs={1.0: 10.0})
    row = fit(lit, uneven(toy, drop_last=drop_last), local_epochs=2, clock=clock).history.rows[0]
    assert row["fl/virtual_seconds"] == pytest.approx(examples * 2)


def test_another_choice_than_the_checkpoints_is_refused(lit: Any, toy: Any, fit: Fit, tmp_path: Path) -> None:
    path = tmp_path / "1.ckpt"
    fit(lit, uneven(toy)).trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match="drop_last: False in the checkpoint, True now"):
        fit(lit, uneven(toy, drop_last=True), max_epochs=2, ckpt_path=path)
    assert fit(lit, uneven(toy), max_epochs=2, ckpt_path=path).trainer.global_step == 2


def test_workers_change_nothing_and_end_with_the_fit(lit_mlp: Any, toy: Any, fit: Fit) -> None:
    runs, others = [], multiprocessing.active_children()
    for num_workers in (0, 2):
        data = ls.FederatedDataModule(Noisy(toy), ls.IIDPartitioner(12), batch_size=4, num_workers=num_workers)
        runs.append(fit(seeded(lit_mlp), data, clients_per_round=3, max_epochs=2).state)
        assert multiprocessing.active_children() == others
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
    def of_columns(step: Any) -> Any:
        return lambda self, batch, batch_idx: step(self, (batch["x"], batch["label"]), batch_idx)

    steps = {name: of_columns(getattr(lit_mlp, name)) for name in ("training_step", "validation_step")}
    rows, split = Table(x=toy.tensors[0], label=toy.tensors[1]), ls.DirichletPartitioner(num_clients=6, alpha=1.0)
    by_row = ls.FederatedDataModule(
        rows, split, val=rows, labels=rows["label"].tolist(), batch_size=4, num_workers=num_workers
    )
    in_memory = ls.FederatedDataModule(toy, split, val=toy, batch_size=4)
    assert same_state(fit(seeded(variant(lit_mlp, **steps)), by_row).state, fit(seeded(lit_mlp), in_memory).state)


def louder(example: Any, client: int) -> Any:
    """Inputs are multiplied, and labels of the first client flipped."""
    inputs, label = example
    return inputs * (client + 1), label if client else 2 - label


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_client_sees_its_examples_through_its_transform(
    num_workers: int, lit_mlp: Any, toy: Any, fit: Fit
) -> None:
    inputs, labels = toy.tensors
    deal, split = ls.DirichletPartitioner(4, alpha=1.0), {"client_val_fraction": 0.25, "stratified": True, "val": toy}
    skewed = ls.FederatedDataModule(toy, deal, batch_size=4, client_transform=louder, num_workers=num_workers, **split)
    plain = ls.FederatedDataModule(toy, deal, batch_size=4, **split)
    client = torch.empty(len(toy), dtype=torch.int64)
    for part in plain.parts[:2]:
        client[part.indices] = torch.arange(4).repeat_interleave(part.sizes)
    seen = TensorDataset(inputs * (client + 1)[:, None], labels.where(client > 0, 2 - labels))
    by_hand = ls.FederatedDataModule(seen, deal, batch_size=4, labels=labels, **split)
    other = copy.copy(skewed)
    other.seed = 5
    tables, states = [], []
    for data in (skewed, by_hand, plain):
        evaluation = ls.ClientEvaluation()
        states.append(fit(seeded(lit_mlp), data, max_epochs=2, callbacks=[evaluation]).state)
        tables.append(str(evaluation.table))
        assert str(data.report()) == str(plain.report())
        assert torch.equal(data.labels_in_examples, labels)
    assert (same_state(*states[:2]), tables[0] == tables[1]) == (True, True)
    assert (same_state(*states[1:]), tables[1] == tables[2]) == (False, False)
    assert skewed.configuration().keys() - plain.configuration().keys() == {"client_transform"}
    assert not torch.equal(other.examples.client_of_example, skewed.examples.client_of_example)
    assert torch.equal(skewed.examples.client_of_example, client)


@pytest.mark.parametrize("wrong", [torch.sin, 3, lambda example: example, [torch.sin]])
def test_a_transform_that_takes_no_client_is_refused(wrong: Any, toy: Any) -> None:
    with pytest.raises(TypeError, match=r"`client_transform` must be .* write lambda example, client: \.\.\."):
        ls.FederatedDataModule(toy, ls.IIDPartitioner(4), client_transform=wrong)
