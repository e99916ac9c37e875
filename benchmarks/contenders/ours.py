"""Our own rounds: ``FedAvg``, or spectral sharding with keep ratio 0.2, in one or several processes.

The seconds are from one round's start to the next, so they include Lightning's work between rounds.
"""

import argparse
import statistics
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, make_model, parser, print_report, tensors

import lightning_spectral as ls

ALGORITHMS = {"FedAvg": ls.FedAvg(), "spectral": ls.SpectralSharding(ls.Collective(), keep_ratio=0.2)}


class LitNet(pl.LightningModule):
    def __init__(self, net: nn.Module, logs: bool) -> None:
        super().__init__()
        self.net, self.logs = net, logs

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        if self.logs:
            self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=MOMENTUM)


class RoundClock(pl.Callback):
    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of every round except the first, and the last, whose end is not recorded."""
        return [end - start for start, end in zip(self.starts[1:], self.starts[2:], strict=False)]


def run(options: argparse.Namespace) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each round, and the median seconds of each stage."""
    x, y = tensors()
    owners = torch.arange(NUM_CLIENTS).repeat_interleave(EXAMPLES)
    data = ls.FederatedDataModule(TensorDataset(x, y), ls.NaturalPartitioner(owners), batch_size=BATCH_SIZE)
    clock, history = RoundClock(), ls.RoundHistory()
    trainer = pl.Trainer(
        max_epochs=options.rounds + 2,
        accelerator="cpu",
        strategy="client_parallel" if options.processes > 1 else "auto",
        devices=options.processes,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, history],
    )
    model = ls.FederatedModule(
        LitNet(make_model(options.model), not options.silent),
        algorithm=ALGORITHMS[options.algorithm],
        clients_per_round=COHORT,
    )
    trainer.fit(model, data)
    stages = ("refresh", "sample", "load", "train", "aggregate", "apply")
    medians = {s: statistics.median(row[f"fl/seconds_{s}"] for row in history.rows[1:-1]) for s in stages}
    return (clock.seconds(), medians) if trainer.global_rank == 0 else ([], {})


if __name__ == "__main__":
    arguments = parser()
    arguments.add_argument("--algorithm", choices=ALGORITHMS, default="FedAvg")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--silent", action="store_true", help="log nothing in the local steps")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    seconds, stages = run(arguments.parse_args())
    if seconds:
        print_report(seconds, ["lightning-spectral", "lightning"], stages=stages)
