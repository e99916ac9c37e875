"""The cost of `RoundDashboard`: a ResNet-18 at keep ratios 0.2 and 0.4, with wandb, TensorBoard and CSV files.

    python benchmarks/dashboard.py

In a single run every other round logs histograms and tables, so that a busy machine affects both kinds of round alike.
The dashboard's time is that of its hooks. It is given as a share of a round without them, at the default interval of
ten rounds; the goal is less than 1 %. The rounds here are short, with few clients and few examples, so the share of
real rounds is smaller. wandb is offline and does its work in a separate process, whose time counts towards the rounds.
The folder of the loggers is removed at the end.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from page import show
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.models import ResNet18

DEFAULT_INTERVAL = ls.RoundDashboard().every_n_rounds
HOOKS = ("on_round_start", "on_round_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end")


class LitResNet(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ResNet18()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class TimedDashboard(ls.RoundDashboard):
    """Records the seconds spent in its hooks, and those of whole rounds, by round."""

    def __init__(self, every_n_rounds: int) -> None:
        super().__init__(every_n_rounds)
        self.own: dict[int, float] = {}
        self.rounds: dict[int, float] = {}
        for hook in HOOKS:
            setattr(self, hook, self._timed(getattr(self, hook)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(trainer: pl.Trainer, *arguments: Any) -> None:
            start = time.perf_counter()
            hook(trainer, *arguments)
            spent = time.perf_counter() - start
            self.own[trainer.current_epoch] = self.own.get(trainer.current_epoch, 0.0) + spent

        return timed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        now = time.perf_counter()
        if trainer.current_epoch:
            self.rounds[trainer.current_epoch - 1] = now - self._start
        self._start = now


def loggers(folder: Path) -> list[Any]:
    for name in ("CACHE", "CONFIG", "DATA"):
        os.environ[f"WANDB_{name}_DIR"] = str(folder)
    os.environ["WANDB_SILENT"] = "true"
    return [CSVLogger(folder), TensorBoardLogger(folder), WandbLogger(offline=True, save_dir=folder)]


def measure(folder: Path, rounds: int, clients: int, examples: int) -> TimedDashboard:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * clients * examples, 3, 32, 32, generator=generator)
    train = TensorDataset(x, torch.randint(10, (len(x),), generator=generator))
    data = ls.FederatedDataModule(
        train, ls.IIDPartitioner(2 * clients), val=torch.utils.data.Subset(train, range(20)), batch_size=20
    )
    sharding = ls.SpectralSharding(keep_ratio={0.2: 0.5, 0.4: 0.5})
    dashboard = TimedDashboard(every_n_rounds=2)
    pl.Trainer(
        max_epochs=rounds + 1,  # the end of the last one is not recorded
        callbacks=[dashboard],
        logger=loggers(folder),
        accelerator="cpu",
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    ).fit(ls.FederatedModule(LitResNet(), algorithm=sharding, clients_per_round=clients), data)
    return dashboard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds, of which the first two are left out")
    parser.add_argument("--clients", type=int, default=4, help="clients per round")
    parser.add_argument("--examples", type=int, default=40, help="training examples per client")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        made = measure(Path(folder), options.rounds, options.clients, options.examples)
    counted = range(2, options.rounds)
    due, others = ([n for n in counted if n % 2 == parity] for parity in (0, 1))
    shown, quiet = (statistics.median(made.own[n] for n in kind) for kind in (due, others))
    a_round = statistics.median(made.rounds[n] - made.own[n] for n in others)
    mean = (shown + (DEFAULT_INTERVAL - 1) * quiet) / DEFAULT_INTERVAL
    rows = [("", "seconds"), ("a round without it", f"{a_round:.3f}"), ("its hooks, round shown", f"{shown:.4f}")]
    show([*rows, ("its hooks, other rounds", f"{quiet:.4f}"), ("share of a round", f"{mean / a_round:.2%}")])


if __name__ == "__main__":
    main()
