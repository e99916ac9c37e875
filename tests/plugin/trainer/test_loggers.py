"""What a federated fit logs, through Lightning's own loggers."""

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from federation import Fit
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from mixed_federation import federate

import lightning_spectral as ls


def test_x_axis_counts_rounds(lit: Any, data: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="comes with the `test` extra")
    trainer = pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=[CSVLogger(tmp_path, name="csv", version=0), TensorBoardLogger(tmp_path, name="tb", version=0)],
        callbacks=[LearningRateMonitor()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(federate(lit, local_epochs=2), data)
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("fl/loss", "fl/bytes_up", "fl/terms_visited", "train_loss", "train_acc", "val_acc", "lr-SGD"):
        assert [row["step"] for row in rows if row.get(name)] == ["0", "1", "2"], name
    for row in rows:
        assert not row["fl/round"] or float(row["fl/round"]) == float(row["step"])
    lrs = [float(row["fl/lr"]) for row in rows if row["fl/lr"]]
    assert lrs[0] == pytest.approx(0.1)
    assert lrs[0] > lrs[1] > lrs[2]


def test_logged_values_are_what_clients_saw(lit: Any, data: Any, fit: Fit) -> None:
    (row,) = fit(lit, data).rows
    assert row["train_loss"] == pytest.approx(row["fl/loss"], rel=1e-6)
    assert row["fl/examples"] == 40
    assert row["fl/clients"] == 4
    assert 0 < row["fl/terms_visited"] <= 1
    assert 0 < row["fl/inclusion_entropy"] <= 1
    assert row["fl/largest_multiplier"] >= 1


def test_ledger_counts_what_travels(lit: Any, data: Any, fit: Fit) -> None:
    fitted = fit(lit, data, max_epochs=2)
    ledger, history = fitted.ledger, fitted.history
    dense = 6 * 12 + 12 + 12 + 12 * 3 + 3
    for ratio, (down, up) in ledger.bytes_per_client().items():
        n = {0.3: 4, 0.6: 8}[ratio]
        assert up == 4 * (dense + n * 24)
        assert down == up + 4 * n
    assert sum(row.uplink_bytes for row in ledger.rows if row.round_idx == 0) == history.rows[0]["fl/bytes_up"]
    assert ledger.total_bytes == sum(row["fl/bytes_up"] + row["fl/bytes_down"] for row in history.rows)


def test_history_draws_a_picture(lit: Any, data: Any, fit: Fit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    history = fit(lit, data, max_epochs=2).history
    history.plot("val_acc", tmp_path / "new/acc.png")
    assert (tmp_path / "new/acc.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(
        ValueError, match=r"no round has a metric 'accuracy'; known metrics: .*fl/loss.*, val_acc, val_loss\."
    ):
        history.plot("accuracy", tmp_path / "accuracy.png")
    with pytest.raises(ValueError, match=r"no round has a metric 'val_acc'; known metrics: none"):
        ls.RoundHistory().plot("val_acc", tmp_path / "accuracy.png")
    assert not (tmp_path / "accuracy.png").exists(), "an empty plot"


def test_a_history_of_another_fit_is_refused_and_one_that_continues_is_not(lit: Any, data: Any, quiet: Any) -> None:
    history = ls.RoundHistory()
    model = ls.FederatedModule(lit, clients_per_round=2)
    trainer = pl.Trainer(**quiet, max_epochs=1, callbacks=[history])
    trainer.fit(model, data)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data)
    assert history.column("fl/round") == [0, 1]
    with pytest.raises(ValueError, match=r"already holds 2 rounds of another fit.*give each fit its own"):
        pl.Trainer(**quiet, max_epochs=1, callbacks=[history]).fit(model, data)
