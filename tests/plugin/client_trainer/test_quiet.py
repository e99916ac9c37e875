"""A client's own Trainer says nothing, leaves nothing behind and is used again."""

import copy
import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit
from torch.utils.data import DataLoader

import lightning_spectral as ls


def test_clients_write_no_line_and_no_file(
    lit: Any, data: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    watched = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in watched]
    for logger in watched:
        logger.addHandler(handler)
    try:
        said = []
        for engine in ("loop", "trainer"):
            records.clear()
            fit(copy.deepcopy(lit), data, client_engine=engine)  # a spectral start is announced once for a module
            said.append(([record.getMessage() for record in records], capfd.readouterr()))
    finally:
        for logger in watched:
            logger.removeHandler(handler)
    assert said[0] == said[1]  # only what the Trainer of the rounds says
    assert list(tmp_path.iterdir()) == []
    assert [logger.level for logger in watched] == levels


def test_one_trainer_serves_all_clients_until_one_fails(lit_mlp: Any, data: Any, quiet: Any) -> None:
    trainers: list[pl.Trainer] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        def on_train_epoch_start(self) -> None:
            assert self.trainer is not federation
            trainers.append(self.trainer)

    data.val = None
    federation = pl.Trainer(max_epochs=2, **quiet)
    federation.fit(ls.FederatedModule(Lit(), clients_per_round=3, client_engine="trainer"), data)
    assert len(trainers) == 6
    assert len({id(trainer) for trainer in trainers}) == 1

    class Failing(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("no")

    federation = pl.Trainer(max_epochs=1, **quiet)
    model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer")
    with pytest.raises(ls.ClientError, match=r"Round 0, client \d+, local training: KeyError: 'no'"):
        federation.fit(model, data)

    trainers.clear()
    leaving_out = ls.server.Faults(on_error=ls.server.LeaveOut(1.0))
    model = ls.FederatedModule(Failing(), clients_per_round=3, client_engine="trainer", faults=leaving_out)
    federation = pl.Trainer(max_epochs=1, **quiet)
    with pytest.warns(ls.SpectralWarning, match=r"left out|no client is left"):
        federation.fit(model, data)
    assert len({id(trainer) for trainer in trainers}) == 3  # one that failed is not used again


def test_global_generators_stay_as_they_are(lit: Any, data: Any, fit: Fit) -> None:
    state = torch.get_rng_state()
    data.val = None
    fit(lit, data)
    assert torch.equal(torch.get_rng_state(), state)


def test_evaluation_data_may_be_a_loader(lit: Any, data: Any, toy: Any, fit: Fit) -> None:
    data.val = DataLoader(toy, batch_size=60)
    assert len(fit(lit, data).history.column("val_acc")) == 2
