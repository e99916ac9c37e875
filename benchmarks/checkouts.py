"""CPU time and peak memory of rounds of this checkout beside those of another one, in interleaved runs.

``python benchmarks/checkouts.py FOLDER`` takes four minutes on one core. FOLDER is a clone of this repository at
another commit. Each line has the median CPU time of a round and the peak memory of the process, here and there, and
their ratio; of each, the smallest of several runs counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.models import ResNet18
from lightning_spectral.plugin.trainer import silence, silent_trainer

HERE = Path(__file__).parents[1]
SHAPES = {"tiny MLP": (8,), "MLP": (64,), "CNN": (1, 8, 8), "ResNet-18": (3, 32, 32)}
EXAMPLES = {"tiny MLP": 200, "MLP": 600, "CNN": 600, "ResNet-18": 80}
ROUNDS = {"tiny MLP": 200, "MLP": 80, "CNN": 30, "ResNet-18": 4}
ALGORITHMS = {"FedAvg": ls.FedAvg(), "spectral": ls.SpectralSharding(keep_ratio=0.2)}


def net(kind: str) -> nn.Module:
    """The network of a line."""
    if kind == "tiny MLP":
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10))
    if kind == "MLP":
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    if kind == "ResNet-18":
        return ResNet18(num_classes=10)
    layers: list[nn.Module] = []
    for c_in, c_out in ((1, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 10))


class Lit(pl.LightningModule):
    """A classifier."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = net(kind)
        self.example_input_array = torch.zeros(2, *SHAPES[kind])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Clock(pl.Callback):
    """The CPU time at the start of each round."""

    def __init__(self) -> None:
        self.starts: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(time.process_time())


def measure(kind: str, algorithm: str) -> dict[str, float]:
    """Median CPU milliseconds of a round, and the peak memory in MiB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    number = EXAMPLES[kind]
    examples = TensorDataset(torch.randn(number, *SHAPES[kind]), torch.randint(10, (number,)))
    data = ls.FederatedDataModule(examples, ls.IIDPartitioner(10), batch_size=10 if number > 80 else 8, drop_last=True)
    model, clock = ls.FederatedModule(Lit(kind), algorithm=ALGORITHMS[algorithm], clients_per_round=5), Clock()
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silent_trainer(accelerator="cpu", devices=1, max_epochs=ROUNDS[kind], callbacks=[clock]).fit(model, data)
    rounds = sorted(b - a for a, b in zip(clock.starts[1:], clock.starts[2:], strict=False))
    return {
        "ms": 1e3 * rounds[len(rounds) // 2],
        "MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run(checkout: Path, kind: str, algorithm: str) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", kind, algorithm]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def main() -> None:
    """Print a line for each network and algorithm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--measure", nargs=2)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure)))
        return
    print(f"{'':<22s}{'ms a round':>20s}{'ratio':>8s}{'MiB at most':>16s}{'ratio':>8s}")
    for kind in SHAPES:
        for algorithm in ALGORITHMS:
            pairs = [[run(c, kind, algorithm) for c in (HERE, options.folder)] for _ in range(options.runs)]
            here, there = (
                {key: min(r[key] for r in runs) for key in ("ms", "MiB")} for runs in zip(*pairs, strict=True)
            )
            times = f"{here['ms']:.2f} / {there['ms']:.2f}"
            memory = f"{here['MiB']:.0f} / {there['MiB']:.0f}"
            ratios = (here[key] / there[key] for key in ("ms", "MiB"))
            print(
                "{:<22s}{:>20s}{:>8.2f}{:>16s}{:>8.2f}".format(
                    f"{kind}, {algorithm}", times, next(ratios), memory, next(ratios)
                )
            )


if __name__ == "__main__":
    main()
