"""Trains a run and stores its results in one JSON file: settings, curves, costs, versions and hardware.

A file appears only when its run is done. An interrupted run continues from its last checkpoint.
"""

from __future__ import annotations

import json
import math
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
from types import MappingProxyType
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
SAME = ("data", "model", "clients_per_round", "local_epochs")  # runs that are alike take as long
TOLD = 60.0  # seconds between two lines on the progress of a run
Evidence = dict[str, Any]


class Stopped(Exception):
    """The minutes are over. The run is not done, and has a checkpoint of its last round."""


class Store:
    """The finished runs: one file for each that was trained here, and those that were stored by others.

    Args:
        folder: The folder of the files.
        kept: The stored runs, by key.
        fresh: Whether stored runs are trained here too.
    """

    def __init__(self, folder: Path, kept: Mapping[str, Evidence] = MappingProxyType({}), fresh: bool = False) -> None:
        self.folder, self.kept, self.fresh = folder, kept, fresh

    def path(self, settings: Settings) -> Path:
        """Return the path of the file of a run, which need not exist."""
        return self.folder / f"{settings.key}.json"

    def has(self, settings: Settings) -> bool:
        """Return whether a run need not be trained."""
        return self.path(settings).exists() or (settings.key in self.kept and not self.fresh)

    def read(self, settings: Settings) -> Evidence | None:
        """Return the results of a run, preferably those from here; ``None`` if it is not done."""
        path = self.path(settings)
        return json.loads(path.read_text()) if path.exists() else self.kept.get(settings.key)

    def seconds_per_round(self, settings: Settings) -> float | None:
        """Return the mean over runs with the same data and model, those of this machine if there are any."""
        for runs in ([json.loads(path.read_text()) for path in self.folder.glob("*.json")], self.kept.values()):
            alike = [run for run in runs if all(run["settings"].get(n) == getattr(settings, n) for n in SAME)]
            if found := [run["seconds"] / run["num_rounds"] for run in alike if not run["error"]]:
                return fmean(found)
        return None

    def write(self, settings: Settings, evidence: Evidence) -> None:
        """Write the file of a run atomically."""
        write_run(self.path(settings), evidence)

    def train(self, settings: Settings, accelerator: str = "auto", end: float = math.inf) -> Evidence | None:
        """Train a run, from its last checkpoint if there is one, and store its results.

        Return ``None`` if another process is training it, or has just finished it.

        Raises:
            Stopped: If it is not done before the end, on the clock of `time.monotonic`.
        """
        checkpoints = self.path(settings).with_suffix("")
        evidence = train_once(self.path(settings), partial(train, settings, checkpoints, accelerator, end))
        if evidence is not None:
            rmtree(checkpoints, ignore_errors=True)
        return evidence


class Deadline(ls.RoundCallback):
    """Ends a run after the last round that can be finished in time, and says each minute how far it is.

    Args:
        name: The run's name.
        folder: Where the checkpoint of that round is written.
        end: When all has to be over, on the clock of `time.monotonic`.
    """

    def __init__(self, name: str, folder: Path, end: float) -> None:
        self.name, self.folder, self.end = name, folder, end
        self.done, self.longest, self.stopped = 0, 0.0, ""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.begun = self.told = self.last = time.monotonic()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the round's time; this is after its evaluation, before which nothing can stop."""
        now, left = time.monotonic(), (trainer.max_epochs or 0) - trainer.current_epoch - 1
        self.done, self.longest, self.last = self.done + 1, max(self.longest, now - self.last), now
        per_round = (now - self.begun) / self.done
        text = f"{self.name}: round {trainer.current_epoch + 1} of {trainer.max_epochs}, "
        text += f"{1 / max(per_round, 1e-9):.2f} rounds/s, {left * per_round / 60:.0f} min left"
        if left and now + self.longest > self.end:
            self.stopped, trainer.should_stop = text, True
            trainer.save_checkpoint(self.folder / f"stopped-{trainer.current_epoch}.ckpt")
        elif now - self.told > TOLD:
            self.told = now
            print(text, flush=True)


def train(settings: Settings, checkpoints: Path, accelerator: str, end: float = math.inf) -> Evidence:
    """Train one run and return its results.

    Args:
        settings: Everything that defines the run.
        checkpoints: Folder for its checkpoints.
        accelerator: The accelerator of Lightning's Trainer.
        end: When it has to stop, on the clock of `time.monotonic`.

    Raises:
        Stopped: If it is not done by then.
    """
    reset_peak_memory()
    begun, source = time.perf_counter(), origin()  # before any file can change
    run = build(settings)
    history, ledger = ls.RoundHistory(), ls.CommunicationLedger()
    chosen = [MEASURES[settings.measure](settings.evaluate_every, run.data.train)] if settings.measure else []
    saving = ModelCheckpoint(checkpoints, every_n_epochs=SHOWN * settings.evaluate_every)
    deadline = Deadline(settings.key, checkpoints, end)
    trainer = pl.Trainer(
        max_epochs=settings.num_rounds,
        accelerator=accelerator,
        devices=1,
        logger=False,
        callbacks=[
            ls.plugin.callbacks.SpectralDiagnostics(settings.evaluate_every),
            *(*chosen, history, ledger, deadline, saving),
        ],
        check_val_every_n_epoch=settings.evaluate_every,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    resumed = ls.latest_checkpoint(checkpoints)
    error = fit(trainer, run.model, run.data, resumed)
    if deadline.stopped:
        raise Stopped(deadline.stopped)
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
