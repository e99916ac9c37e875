"""The device half in another process, against the sequential executor: the same bits, ledger and logged values."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_spectral as ls
from lightning_spectral.client.local_optimizer import recipe_of
from lightning_spectral.protocol.records import Download, Upload
from lightning_spectral.server.executor import Executor
from lightning_spectral.server.run import Run

sys.path.insert(0, str(Path(__file__).parents[1]))  # the other process imports these by name
from conftest import LitMLP
from other_process import LitFails, OtherProcess, data_of_clients, toy_data

ALGORITHMS = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(
        ls.Unbiased(),
        keep_ratio={0.3: 0.5, 0.6: 0.5},
        clip_tau=2.0,
        layers=ls.LayerChoices(keep_first_and_last_dense=False),
    ),
}


class Elsewhere(ls.FederatedModule):
    """A federation whose clients train in another process."""

    executor: OtherProcess

    def make_executor(self, run: Run) -> Executor:
        recipes = [recipe_of(template, self.module) for template in self.templates()]
        trainer, self.module.trainer = self.module._trainer, None
        self.executor = OtherProcess(run.algorithm.client_side(run.server), self.module, recipes, data_of_clients)
        self.module.trainer = trainer
        return self.executor


@contextmanager
def closing(model: ls.FederatedModule) -> Iterator[None]:
    try:
        yield
    finally:
        if isinstance(model, Elsewhere):
            model.executor.close()


def run(
    kind: type[ls.FederatedModule], algorithm: Any, quiet: dict[str, Any], lit: type[LitMLP] = LitMLP
) -> tuple[Any, Any, Any, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = lit()
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    model = kind(module, algorithm=algorithm, clients_per_round=4, local_epochs=2, seed=3)
    trainer = pl.Trainer(max_epochs=3, callbacks=[history, ledger], **quiet)
    with closing(model):
        trainer.fit(model, toy_data())
    return model, history, ledger, trainer


def logged(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "seconds" not in name}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_device_in_another_process_gives_the_same_bits(name: str, quiet: dict[str, Any]) -> None:
    ours, history, ledger, trainer = run(Elsewhere, ALGORITHMS[name], quiet)
    theirs, *expected = run(ls.FederatedModule, ALGORITHMS[name], quiet)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[key]), key
    assert ledger.rows == expected[1].rows
    assert {row["train_loss"] > 0 and row["train_acc"] > 0 for row in history.rows} == {True}
    for row, other in zip(history.rows, expected[0].rows, strict=True):
        assert {k: v for k, v in row.items() if "seconds" not in k} == {
            k: v for k, v in other.items() if "seconds" not in k
        }
    logged = [
        {k: float(v) for k, v in t.callback_metrics.items() if "seconds" not in k} for t in (trainer, expected[2])
    ]
    assert logged[0] == logged[1]


def test_only_downloads_and_uploads_travel(quiet: dict[str, Any]) -> None:
    model, *_ = run(Elsewhere, ls.FedAvg(), quiet)
    assert model.executor.sent == {Download}
    assert model.executor.received == {Upload}


def test_a_failure_in_another_process_has_its_address(quiet: dict[str, Any]) -> None:
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: Unpicklable: the sensor is broken"):
        run(Elsewhere, ls.FedAvg(), quiet, LitFails)
