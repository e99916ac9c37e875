"""Trains a run and stores its results in one JSON file: settings, curves, costs, versions and hardware.

A file appears only when its run is done. An interrupted run continues from its last checkpoint.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from build import build
from lightning.pytorch.callbacks import ModelCheckpoint
from measures import MEASURES, Holders
from settings import Settings

sys.path.append(str(Path(__file__).parents[2] / "studies"))  # code that the examples and the studies share
from records import train_once, write_run

import lightning_spectral as ls

PACKAGES = ("lightning-spectral", "torch", "lightning", "torchmetrics", "numpy", "scipy")
SHOWN = 5  # evaluations between two checkpoints
Evidence = dict[str, Any]


class Store:
    """The finished runs, one file each.

    Args:
        folder: The folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, settings: Settings) -> Path:
        """Return the path of the file of a run, which need not exist."""
        return self.folder / f"{settings.key}.json"

    def read(self, settings: Settings) -> Evidence | None:
        """Return the results of a run; ``None`` if it is not done."""
        path = self.path(settings)
        return json.loads(path.read_text()) if path.exists() else None

    def write(self, settings: Settings, evidence: Evidence) -> None:
        """Write the file of a run atomically."""
        write_run(self.path(settings), evidence)

    def train(self, settings: Settings, accelerator: str = "auto") -> Evidence | None:
        """Train a run, from its last checkpoint if there is one, and store its results.

        Return ``None`` if another process is training it, or has just finished it.
        """
        checkpoints = self.path(settings).with_suffix("")
        evidence = train_once(self.path(settings), partial(train, settings, checkpoints, accelerator))
        if evidence is not None:
            rmtree(checkpoints, ignore_errors=True)
        return evidence


def train(settings: Settings, checkpoints: Path, accelerator: str) -> Evidence:
    """Train one run and return its results.

    Args:
        settings: Everything that defines the run.
        checkpoints: Folder for its checkpoints.
        accelerator: The accelerator of Lightning's Trainer.
    """
    reset_peak_memory()
    begun, source = time.perf_counter(), origin()  # before any file can change
    run = build(settings)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    chosen = [MEASURES[settings.measure](settings.evaluate_every, run.data.train)] if settings.measure else []
    saving = ModelCheckpoint(checkpoints, every_n_epochs=SHOWN * settings.evaluate_every)
    trainer = pl.Trainer(
        max_epochs=settings.num_rounds,
        accelerator=accelerator,
        devices=1,
        logger=False,
        callbacks=[ls.plugin.callbacks.SpectralDiagnostics(settings.evaluate_every), *chosen, history, ledger, saving],
        check_val_every_n_epoch=settings.evaluate_every,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    resumed = ls.latest_checkpoint(checkpoints)
    error = fit(trainer, run.model, run.data, resumed)
    evaluated = [row for row in history.rows if "val_accuracy" in row]
    return {
        "settings": asdict(settings),
        "num_rounds": settings.num_rounds,
        "error": error,
        "final": evaluated[-1] if evaluated and not error else {},
        "curves": curves(history.rows),
        "means": means(history.rows),
        "holders": next((one.means() for one in chosen if isinstance(one, Holders)), {}),
        "bytes_per_turn": {str(ratio): sum(both) for ratio, both in ledger.bytes_per_client().items()},
        "total_bytes": ledger.total_bytes,
        "seconds": round(time.perf_counter() - begun, 1),
        "resumed": resumed is not None,
        "peak_bytes": peak_memory(),
        "federation": run.model.hparams["federation"],
        **source,
    }


def fit(trainer: pl.Trainer, model: ls.FederatedModule, data: ls.FederatedDataModule, resumed: str | None) -> str:
    """Fit the model. Return the first line of the error if the run diverges, else an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ls.SpectralWarning)  # mostly noisy sub-models are what is studied here
            warnings.filterwarnings("ignore", "Checkpoint directory")  # of a resumed run
            trainer.fit(model, data, ckpt_path=resumed)
    except (ls.errors.RoundError, ls.ClientError) as failure:  # a diverged run is a result
        return str(failure).splitlines()[0]
    return ""


def curves(rows: Sequence[Mapping[str, float]]) -> dict[str, list[tuple[int, float]]]:
    """Return pairs of round, counted from 1, and value; metrics logged every round are kept only at evaluations."""
    evaluated = [row for row in rows if "val_accuracy" in row]
    points: dict[str, list[tuple[int, float]]] = {}
    for name in sorted({name for row in rows for name in row} - {"fl/round"}):
        logged = [row for row in rows if name in row]
        shown = evaluated if len(logged) == len(rows) else logged
        points[name] = [(int(row["fl/round"]) + 1, row[name]) for row in shown]
    return points


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the rounds that logged it."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            values[name].append(value)
    return {name: fmean(column) for name, column in values.items()}


def origin() -> dict[str, Any]:
    """Return where the numbers come from: commit, versions and hardware."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{package: version(package) for package in PACKAGES}},
        "hardware": {
            "cpu": cpu_name(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


@cache
def commit() -> str | None:
    """Return this clone's commit when the first run began, with a plus if files differ; ``None`` outside a clone."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True, check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + "+" * bool(changed)


def cpu_name() -> str:
    """Return the model of the processor, if the system reports it."""
    listed = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", listed.read_text()) if listed.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def reset_peak_memory() -> None:
    """Reset the memory peaks left by earlier runs of this process, where possible."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed: the peak covers all runs so far
        return


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes since the last reset: in RAM, and on the GPU."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.exists() else None
    cpu = {"cpu": 1024 * int(found[1])} if found else {}
    return cpu | ({"gpu": torch.cuda.max_memory_allocated()} if torch.cuda.is_available() else {})
