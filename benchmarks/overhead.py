"""Seconds per round against a bare PyTorch loop that takes the same local steps, from one interleaved run.

    python benchmarks/overhead.py

100 clients x 100 examples of CIFAR's shape, 10 clients a round, batch 20, one local epoch, SGD with momentum, one
thread. The bare loop copies weights in, steps, and averages; it has no Trainer, no logging, no ledger, no check for
finite updates and, for spectral sharding, neither factorisation nor sampling: its sub-models are given. Ratios are of
medians over rounds; the contenders take turns, so that a busy machine hits all alike.
"""

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.nn import sharded_layers
from lightning_spectral.nn.report import aligned

NUM_CLIENTS, EXAMPLES, COHORT, BATCH_SIZE = 100, 100, 10, 20
SHARDING = ls.SpectralSharding(ls.Collective(), keep_ratio=0.2)


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


class LitNet(pl.LightningModule):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class RoundClock(pl.Callback):
    """Seconds from one round's start to the next, all of Lightning's work between rounds included."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.starts[1:], self.starts[2:], strict=False)]


def ours(make: Callable[[], nn.Module], algorithm: Any, data: ls.FederatedDataModule, rounds: int) -> Any:
    """Seconds of each round, and the history with the seconds of each stage."""
    clock, history = RoundClock(), ls.RoundHistory()
    trainer = pl.Trainer(
        max_epochs=rounds + 2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, history],
    )
    trainer.fit(ls.FederatedModule(LitNet(make), algorithm=algorithm, clients_per_round=COHORT), data)
    return clock.seconds(), history.rows[1:-1]


def bare(make: Callable[[], nn.Module], sharded: bool, data: ls.FederatedDataModule, rounds: int) -> Iterator[float]:
    """Seconds of each round of a hand-written loop."""
    server = LitNet(make).net
    if sharded:
        server = ls.replace_layers(server, keep_ratio=0.2)
    client = copy.deepcopy(server)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.01, momentum=0.9)
    if sharded:
        ls.FrobeniusDecay(dict.fromkeys(sharded_layers(client), 1e-4)).register(optimizer, client)
        ls.EffectiveLRClip(10.0).register(optimizer, client)
    x, y = data.train.tensors  # type: ignore[attr-defined]
    for _ in range(rounds + 1):
        start = time.perf_counter()
        sums = [torch.zeros_like(p) for p in server.parameters()]
        for client_id in torch.randperm(NUM_CLIENTS)[:COHORT].tolist():
            with torch.no_grad():
                for mine, theirs in zip(client.parameters(), server.parameters(), strict=True):
                    mine.copy_(theirs)
            optimizer.state.clear()
            indices = data.partition[client_id]
            for chosen in indices[torch.randperm(len(indices))].split(BATCH_SIZE):
                optimizer.zero_grad()
                nn.functional.cross_entropy(client(x[chosen]), y[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                torch._foreach_add_(sums, list(client.parameters()), alpha=len(indices))
        with torch.no_grad():
            for theirs, total in zip(server.parameters(), sums, strict=True):
                theirs.copy_(total / (COHORT * EXAMPLES))
        yield time.perf_counter() - start


def shares(rows: list[dict[str, float]], total: float) -> str:
    stages = ("refresh", "sample", "aggregate", "train")
    parts = (statistics.median(row[f"fl/seconds_{stage}"] for row in rows) / total for stage in stages)
    return ", ".join(f"{stage} {part:.1%}" for stage, part in zip(stages, parts, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="rounds per turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*LeafSpec")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_CLIENTS * EXAMPLES, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (len(x),), generator=generator)
    data = ls.FederatedDataModule(TensorDataset(x, labels), ls.IIDPartitioner(NUM_CLIENTS), batch_size=BATCH_SIZE)

    table = [("model", "algorithm", "bare s/round", "ours s/round", "ratio", "share of our round")]
    for name, make in {"CNN": cnn, "tiny MLP": mlp}.items():
        for algorithm in (ls.FedAvg(), SHARDING):
            bare_seconds: list[float] = []
            our_seconds: list[float] = []
            rows: list[dict[str, float]] = []
            for _ in range(options.turns):
                bare_seconds += list(bare(make, algorithm is SHARDING, data, options.rounds))[1:]
                seconds, stages = ours(make, algorithm, data, options.rounds)
                our_seconds += seconds
                rows += stages
            low, high = statistics.median(bare_seconds), statistics.median(our_seconds)
            kind = type(algorithm).__name__
            table.append((name, kind, f"{low:.4f}", f"{high:.4f}", f"{high / low:.3f}", shares(rows, high)))
    print("\n".join(aligned(table)))


if __name__ == "__main__":
    main()
