"""A last batch of one example, with which BatchNorm cannot train, and a run that leaves it out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from one_by_one import OneByOne
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

SIZES = (9, 5, 2, 4)  # in batches of 4: short last batches of one, one, two and none
ENGINES = ["loop", "trainer"]


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


@pytest.mark.parametrize("client_engine", ENGINES)
def test_batch_norm_on_one_example_is_an_error(
    client_engine: str, with_batch_norm: Any, toy: TensorDataset, fit: Fit
) -> None:
    with pytest.raises(ls.ClientError, match=r"client [01], local .*one example: leave such .* drop_last=True\)"):
        fit(with_batch_norm, uneven(toy), client_engine=client_engine)


@pytest.mark.parametrize("client_engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"in_memory": False}, {"in_memory": False, "num_workers": 1}], ids=repr)
def test_every_client_trains_without_short_last_batches(
    options: dict[str, Any], client_engine: str, with_batch_norm: Any, toy: TensorDataset, fit: Fit
) -> None:
    steps: dict[int, int] = {}

    class Count(ls.RoundCallback):
        def on_round_end(self, trainer: Any, pl_module: Any, summary: Any) -> None:
            steps.update({client.client_id: client.num_steps for client in summary.clients})

    data = uneven(toy, drop_last=True, **options)
    found = fit(with_batch_norm, data, callbacks=[Count()], local_epochs=3, client_engine=client_engine)
    assert steps == {0: 6, 1: 3, 2: 3, 3: 3}
    assert found.rows[0]["fl/examples"] == sum(SIZES)  # weights still count all examples


@pytest.mark.parametrize(("drop_last", "examples"), [(False, 9), (True, 8)])
def test_the_clock_predicts_what_is_trained(drop_last: bool, examples: int, lit: Any, toy: Any, fit: Fit) -> None:
    clock = ls.VirtualClock(ls.simulation.DeviceProfile(1e12, 1e12, 30.0), macs={1.0: 10.0})
    row = fit(lit, uneven(toy, drop_last=drop_last), local_epochs=2, clock=clock).history.rows[0]
    assert row["fl/virtual_seconds"] == pytest.approx(examples * 2)


def test_another_choice_than_the_checkpoints_is_refused(lit: Any, toy: Any, fit: Fit, tmp_path: Path) -> None:
    ckpt, older = tmp_path / "1.ckpt", tmp_path / "older.ckpt"
    fit(lit, uneven(toy)).trainer.save_checkpoint(ckpt)
    content = torch.load(ckpt, weights_only=True)
    del content["federation"]["drop_last"]
    torch.save(content, older)
    for path in (ckpt, older):
        with pytest.raises(ValueError, match="drop_last: False in the checkpoint, True now"):
            fit(lit, uneven(toy, drop_last=True), max_epochs=2, ckpt_path=path)
        assert fit(lit, uneven(toy), max_epochs=2, ckpt_path=path).trainer.global_step == 2
