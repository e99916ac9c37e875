"""Files that one client's turn passes through, and calls from one to another.

A turn is everything between two calls of `on_client_start`, in the second round of a tiny federation. Files are those
of this package, in which a user's module is not. Run it as ``python benchmarks/hops.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.trainer import silence, silent_trainer

PACKAGE = str(Path(ls.__file__).parent)
ALGORITHMS = {"FedAvg": ls.FedAvg(), "spectral": ls.SpectralSharding(keep_ratio=0.5), "LoRA": ls.LoRA(2)}


class Hops(ls.RoundCallback):
    """Follows the calls of one turn.

    Attributes:
        files: The package's files in which a function was called.
        hops: Number of calls from one file into another one of the package.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.hops = self.turns = 0

    def on_client_start(self, trainer: pl.Trainer, pl_module: Any, turn: Any) -> None:
        """Begin, or end, with the second and third turn of the second round."""
        if trainer.current_epoch == 1:
            self.turns += 1
            sys.setprofile(self._note if self.turns == 2 else None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(PACKAGE):
            self.files.add(file)
            self.hops += frame.f_back is not None and frame.f_back.f_code.co_filename != file


class LitNet(pl.LightningModule):
    """A small network with a layer between the first and the last, as a user writes it."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.net(x)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, labels = batch
        loss = nn.functional.cross_entropy(self(x), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def counted(model: pl.LightningModule, data: pl.LightningDataModule) -> Hops:
    """Fit two rounds and count."""
    hops = Hops()
    with silence():
        silent_trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=[hops]).fit(model, data)
    return hops


def main() -> None:
    """Print a line for each algorithm, and one for two models."""

    def clients() -> ls.FederatedDataModule:
        return ls.FederatedDataModule(
            TensorDataset(torch.randn(48, 6), torch.zeros(48, dtype=torch.long)), ls.IIDPartitioner(6), batch_size=4
        )

    found = {
        name: counted(ls.FederatedModule(LitNet(), algorithm=algorithm, clients_per_round=4), clients())
        for name, algorithm in ALGORITHMS.items()
    }
    models = {name: ls.FederatedModule(LitNet()) for name in ("a", "b")}
    both = ls.MultiModelModule(models, participation=ls.Uniform(active=6))
    found["two models"] = counted(both, ls.MultiModelDataModule({name: clients() for name in models}))
    for name, hops in found.items():
        print(f"{name:<12} {len(hops.files):>3} files {hops.hops:>5} hops")


if __name__ == "__main__":
    main()
