from pathlib import Path
from typing import Any

import pytest
from federation import Fit

import lightning_spectral as ls

wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")
from offline_wandb import axes_of, offline_logger, rows_of, run_records  # noqa: E402


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_holds_every_round_against_the_round(
    lit: Any, data: Any, tmp_path: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = offline_logger(tmp_path, monkeypatch)
    sharding = ls.SpectralSharding(keep_ratio=0.5)
    fit(lit, data, algorithm=sharding, clients_per_round=3, max_epochs=3, trainer={"logger": logger})
    wandb.finish()
    records = run_records(tmp_path)
    assert axes_of(records)["*"] == "fl/round"
    rows = rows_of(records)
    losses = [(row["fl/round"], row["fl/loss"]) for row in rows if "fl/loss" in row]
    assert [round_idx for round_idx, _ in losses] == [0, 1, 2]
    accuracies = [row["fl/round"] for row in rows if "val_acc" in row]
    assert accuracies == [0, 1, 2]
    for name in ("fl/bytes_down", "fl/seconds_train", "fl/terms_visited", "fl/inclusion_entropy", "train_loss"):
        assert sum(name in row for row in rows) == 3, name
