"""Made-up runs, as CSVLogger would leave them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

SECONDS = {f"fl/seconds_{stage}": 0.1 for stage in ("refresh", "sample", "load", "train", "aggregate", "apply")}


def rounds(accuracies: Iterable[float], **extra: float) -> list[dict[str, float]]:
    """A row for each round, and one for its evaluation."""
    rows: list[dict[str, float]] = []
    for index, accuracy in enumerate(accuracies):
        sent = {"fl/bytes_down": 2e6, "fl/bytes_up": 1e6, "fl/loss": 1.0, "train_loss": 1.0, **SECONDS}
        rows.append({"fl/round": index, "epoch": index, "step": index, **sent, **extra})
        rows.append({"fl/round": index, "epoch": index, "step": index, "val_acc": accuracy, "val_loss": 1 - accuracy})
    return rows


def write_csv(folder: Path, rows: list[dict[str, float]], config: Mapping[str, Any] | None = None) -> Path:
    """``metrics.csv`` and ``hparams.yaml`` in a new folder, which is returned."""
    folder.mkdir(parents=True)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        writer.writeheader()
        writer.writerows(rows)
    (folder / "hparams.yaml").write_text(yaml.safe_dump(dict(config or {})))
    return folder


def strategies(root: Path, **extra: float) -> Path:
    """Two strategies with two seeds each."""
    for strategy, gain in (("TopN()", 0.0), ("Collective(cohort='group')", 0.1)):
        for seed in range(2):
            config = {"federation": {"algorithm": f"SpectralSharding(strategy={strategy})", "seed": seed}}
            accuracies = [0.5 + gain + 0.01 * seed, 0.6 + gain + 0.02 * seed]
            write_csv(root / strategy.partition("(")[0] / f"version_{seed}", rounds(accuracies, **extra), config)
    return root
