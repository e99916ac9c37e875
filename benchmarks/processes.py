"""Seconds per round with 1, 2, ... processes, from one interleaved run.

    python benchmarks/processes.py --processes 1 2

The CNN of overhead.py: 100 clients x 100 examples of CIFAR's shape, 10 clients a round, batch 20, one local epoch, one
thread in each process. Every turn is a command of its own that Lightning starts its processes from. Speeds are relative
to the first number of processes, from medians over rounds; behind them the medians of the turns. Where other programs
use the cores too, wall-clock time shows their work as well. So there are also the CPU seconds of the busiest process:
what a round would take on cores of its own, waiting apart.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings

import lightning.pytorch as pl
import torch
from overhead import BATCH_SIZE, COHORT, NUM_CLIENTS, SHARDING, LitNet, RoundClock, cnn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.nn.report import aligned

ALGORITHMS = {"FedAvg": ls.FedAvg(), "SpectralSharding": SHARDING}


class CPUClock(RoundClock):
    """Also the CPU seconds of this process."""

    def __init__(self) -> None:
        super().__init__()
        self.cpu: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.cpu.append(time.process_time())

    def cpu_seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.cpu[1:], self.cpu[2:], strict=False)]


def train(algorithm: str, num_processes: int, rounds: int) -> None:
    """One turn: prints the seconds of each round but the first, wall-clock and of the busiest process."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_CLIENTS * 100, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (len(x),), generator=generator)
    data = ls.FederatedDataModule(TensorDataset(x, labels), ls.IIDPartitioner(NUM_CLIENTS), batch_size=BATCH_SIZE)
    clock = CPUClock()
    trainer = pl.Trainer(
        max_epochs=rounds + 2,
        accelerator="cpu",
        strategy="client_parallel" if num_processes > 1 else "auto",
        devices=num_processes,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock],
    )
    model = ls.FederatedModule(LitNet(cnn), algorithm=ALGORITHMS[algorithm], clients_per_round=COHORT)
    trainer.fit(model, data)
    busiest = [max(of_all) for of_all in zip(*model.processes.gather(clock.cpu_seconds()), strict=True)]
    if trainer.global_rank == 0:
        print(json.dumps([clock.seconds(), busiest]))


def turn(algorithm: str, num_processes: int, rounds: int) -> list[list[float]]:
    """Both kinds of seconds of each round of one turn, in a command of its own."""
    command = [
        sys.executable,
        __file__,
        "--turn",
        algorithm,
        "--processes",
        str(num_processes),
        "--rounds",
        str(rounds),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    seconds: list[list[float]] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8, help="rounds per turn")
    parser.add_argument("--turns", type=int, default=4, help="turns of each contender")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn:
        train(options.turn, options.processes[0], options.rounds)
        return
    table = [("algorithm", "seconds", "processes", "s/round", "speed", "medians of turns")]
    for algorithm in ALGORITHMS:
        turns: dict[int, list[list[list[float]]]] = {number: [] for number in options.processes}
        for _ in range(options.turns):
            for number, seconds in turns.items():
                seconds.append(turn(algorithm, number, options.rounds))
        for i, kind in enumerate(("wall clock", "busiest CPU")):
            medians = {n: statistics.median(s for seconds in turns[n] for s in seconds[i]) for n in turns}
            for number, median in medians.items():
                spread = ", ".join(f"{statistics.median(seconds[i]):.3f}" for seconds in turns[number])
                speed = f"{medians[options.processes[0]] / median:.2f}"
                table.append((algorithm, kind, str(number), f"{median:.3f}", speed, spread))
    print("\n".join(aligned(table)))


if __name__ == "__main__":
    main()
