"""Offline runs of Weights & Biases: made in a folder that holds all their files, and read back."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger


def offline_logger(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> WandbLogger:
    """A silent logger that writes files only to ``folder``."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(folder / "wandb"))
    return WandbLogger(project="test", offline=True, save_dir=folder, **options)


def run_records(folder: Path) -> list[dict[str, Any]]:
    """The records of the only run in a folder, read by wandb's own command."""
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    command = shutil.which("wandb", path=str(Path(sys.executable).parent)) or shutil.which("wandb")
    assert command is not None
    done = subprocess.run([command, "leet", "inspect", "--json", str(path)], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def rows_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged, call by call."""
    return [record["history"]["item"] for record in records if record["type"] == "history"]


def configs_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was added to the run's config after it began, update by update."""
    return [record["config"]["update"] for record in records if record["type"] == "config"]


def axes_of(records: list[dict[str, Any]]) -> dict[str, str]:
    """The axis of each metric, or pattern of metrics, that was given one."""
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    return {m.get("name") or m["glob_name"]: m["step_metric"] for m in metrics if "step_metric" in m}


def logged_table(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of all tables of a name, in the order in which they were logged."""
    media = next(folder.glob("wandb/offline-run-*")) / "files/media/table"
    paths = sorted(media.glob(f"{name}_*.table.json"), key=lambda path: int(path.name.split("_")[-2]))
    tables = [json.loads(path.read_text()) for path in paths]
    return [dict(zip(table["columns"], row, strict=True)) for table in tables for row in table["data"]]
