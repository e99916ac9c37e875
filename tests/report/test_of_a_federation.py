"""A report reads what `RoundDashboard` and `ClientEvaluation` of a federation leave behind, whichever the logger."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from federation import Fit, seeded
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

import lightning_spectral as ls
from lightning_spectral.plugin.trainer.run_config import as_config
from lightning_spectral.report.dashboard import client_tables, spectra
from lightning_spectral.report.groups import group_runs
from lightning_spectral.report.measures import clients_at_end, megabytes
from lightning_spectral.report.media import LoggedTable
from lightning_spectral.report.names import CLIENT_TABLE, OVER_BYTES
from lightning_spectral.report.reading import read_run, read_runs
from lightning_spectral.report.runs import LoggedRun

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # in wandb
SPECTRAL = ls.SpectralSharding(keep_ratio={0.25: 0.5, 0.5: 0.5})
ROUNDS = 3


def filled(table: LoggedTable) -> list[dict[str, Any]]:
    """Rows without empty cells, which text files cannot tell from empty strings, with the digits TensorBoard gets."""
    known = ({n: v for n, v in zip(table.columns, row, strict=True) if v not in ("", None)} for row in table.rows)
    return [{n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in row.items()} for row in known]


def without_copies(row: Mapping[str, float]) -> dict[str, float]:
    """What is not over bytes, which TensorBoard has as steps."""
    return {name: value for name, value in row.items() if not name.startswith(OVER_BYTES)}


@pytest.fixture
def runs(
    lit_mlp: Any, toy: Any, fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[LoggedRun, LoggedRun, LoggedRun, Any]:
    """One federation as logged to CSV files, wandb and TensorBoard, and the fit itself."""
    wandb = pytest.importorskip("wandb", reason="wandb is in the `report` extra")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    loggers = [
        CSVLogger(tmp_path, name=None, version="csv"),
        WandbLogger(save_dir=tmp_path, offline=True),
        TensorBoardLogger(tmp_path, name=None, version="events"),
    ]
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(8), val=toy, batch_size=4, client_val_fraction=0.4)
    watching = [ls.RoundDashboard(1), ls.ClientEvaluation(clients="participants")]
    fitted = fit(
        seeded(lit_mlp), data, algorithm=SPECTRAL, max_epochs=ROUNDS, callbacks=watching, trainer={"logger": loggers}
    )
    wandb.finish()
    wandb.teardown()
    (csv,), (offline,), (events,) = (read_runs([tmp_path / name])[0] for name in ("csv", "wandb", "events"))
    return csv, offline, events, fitted


def test_csv_files_wandb_tensorboard_and_the_history_hold_the_same(
    runs: tuple[LoggedRun, LoggedRun, LoggedRun, Any], tmp_path: Path
) -> None:
    csv, offline, events, fitted = runs
    fitted.history.save(tmp_path / "new/run.json", config=dict(fitted.model.hparams))
    assert ls.RoundHistory.load(tmp_path / "new/run.json").state_dict() == fitted.history.state_dict()
    for run in (csv, offline, events, read_run(tmp_path / "new/run.json")):
        assert len(run.rows) == ROUNDS
        for found, expected in zip(run.rows, fitted.history.rows, strict=True):
            assert without_copies(found) == pytest.approx(without_copies(expected))
        assert run.config["federation"] == fitted.model.hparams["federation"]
        assert "val_acc" in run.names - run.from_clients
        assert "train_acc" in run.from_clients
    assert not any(name.startswith(OVER_BYTES) for name in events.names)
    for run in (csv, offline, events):
        found = spectra(run)
        assert {layer: sorted(by_round) for layer, by_round in found.items()} == {"net.2": [0, 1, 2]}
        assert len(found["net.2"][0]) == 12
        assert (np.diff(found["net.2"][0]) <= 0).all()
        sent = megabytes(run)
        assert sent is not None
        assert sent.last == pytest.approx(fitted.ledger.total_bytes / 1e6, rel=1e-6)
        assert clients_at_end(run, "val_acc") is not None
        np.testing.assert_allclose(found["net.2"][1], spectra(csv)["net.2"][1], rtol=1e-6)
        assert filled(client_tables(run)[""][1]) == filled(client_tables(csv)[""][1])
    index, table = client_tables(csv)[""]
    assert index == ROUNDS - 1
    ledger = [row for row in fitted.ledger.rows if row.round_idx == index]
    assert table.column("client") == [row.client_id for row in ledger]
    assert set(csv.media[CLIENT_TABLE]) == set(range(ROUNDS))


def test_runs_that_differ_in_their_seed_are_one_group_and_strategies_are_told_apart() -> None:
    def run(strategy: ls.sharding.ShardingStrategy, seed: int) -> LoggedRun:
        config = {"federation": {"algorithm": as_config(ls.SpectralSharding(strategy)), "seed": seed}}
        return LoggedRun("run", Path(f"{strategy}{seed}"), config, ({"fl/round": 0.0, "val_acc": 0.5},))

    groups, names = group_runs([run(ls.TopN(), 0), run(ls.TopN(), 1), run(ls.Collective(), 0)])
    assert names == ["federation/algorithm/strategy"]
    assert [(group.label, len(group.runs)) for group in groups] == [("TopN", 2), ("Collective", 1)]
