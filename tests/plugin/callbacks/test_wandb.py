import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from federation import Fit

import lightning_spectral as ls

wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")


def inspect_run(folder: Path) -> str:
    """An offline run as text, read by wandb's own command."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = shutil.which("wandb", path=str(Path(sys.executable).parent)) or shutil.which("wandb")
    assert command is not None
    done = subprocess.run([command, "leet", "inspect", "--json", str(path)], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_an_offline_run_holds_every_round_against_the_round(
    lit: Any, data: Any, tmp_path: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="test", offline=True, save_dir=tmp_path)
    sharding = ls.SpectralSharding(keep_ratio=0.5)
    fit(lit, data, algorithm=sharding, clients_per_round=3, max_epochs=3, trainer={"logger": logger})
    wandb.finish()
    records = [json.loads(line) for line in inspect_run(tmp_path).splitlines()]
    axes = [
        r["metric"].get("step_metric") for r in records if r["type"] == "metric" and r["metric"].get("glob_name") == "*"
    ]
    assert axes[-1] == "fl/round"
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    losses = [(row["fl/round"], row["fl/loss"]) for row in rows if "fl/loss" in row]
    assert [round_idx for round_idx, _ in losses] == [0, 1, 2]
    accuracies = [row["fl/round"] for row in rows if "val_acc" in row]
    assert accuracies == [0, 1, 2]
    for name in ("fl/bytes_down", "fl/seconds_train", "fl/terms_visited", "fl/inclusion_entropy", "train_loss"):
        assert sum(name in row for row in rows) == 3, name
