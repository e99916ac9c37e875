"""The cost of a round as the federation grows, and as the cohort grows.

    python benchmarks/scale.py

Every row is measured in a process of its own: the median seconds per round, and the peak memory that rounds add to the
data, the partition and the model, which the process holds before the first round. First the population grows: 10
clients per round out of 100, 10,000 and 1,000,000. Then the cohort grows: 10, 100 and 1,000 clients per round. A client
takes one step on 4 examples. The model is an MLP of 2.1 million parameters at keep ratio 0.2, so a list of a thousand
updates would take 3.4 GB.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from page import show, write
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

EXAMPLES, FEATURES, WIDTH = 4, 8, 1024
POPULATIONS, COHORTS = (100, 10_000, 1_000_000), (10, 100, 1_000)


class LitWide(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        wide = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
        self.net = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *wide, nn.Linear(WIDTH, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Meter(pl.Callback):
    """Records the time at the start of each round, and the peak memory before the first."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.before = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.before = self.before or peak_mib()
        self.starts.append(time.perf_counter())

    def seconds(self) -> float:
        return statistics.median(b - a for a, b in zip(self.starts[1:], self.starts[2:], strict=False))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(population: int, cohort: int, rounds: int) -> dict[str, float]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    count = population * EXAMPLES  # expanded, so the data take no memory
    data = TensorDataset(
        torch.zeros(1, FEATURES).expand(count, FEATURES), torch.zeros(1, dtype=torch.long).expand(count)
    )
    torch.manual_seed(0)
    model = ls.FederatedModule(LitWide(), algorithm=ls.SpectralSharding(keep_ratio=0.2), clients_per_round=cohort)
    meter = Meter()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(max_epochs=rounds + 2, accelerator="cpu", callbacks=[meter], **quiet)
    trainer.fit(model, ls.FederatedDataModule(data, ls.IIDPartitioner(population), batch_size=EXAMPLES))
    return {"seconds": meter.seconds(), "before": meter.before, "peak": peak_mib()}


def in_a_process(population: int, cohort: int, rounds: int) -> dict[str, float]:
    arguments = [f"--population={population}", f"--cohort={cohort}", f"--rounds={rounds}"]
    done = subprocess.run([sys.executable, __file__, *arguments], check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; fewer for large cohorts")
    parser.add_argument("--population", type=int, default=0, help="measure this one case and print it as JSON")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="write the table to docs/tables")
    options = parser.parse_args()
    if options.population:
        print(json.dumps(measure(options.population, options.cohort, options.rounds)))
        return
    cases = [(population, 10) for population in POPULATIONS] + [(10_000, cohort) for cohort in COHORTS[1:]]
    table = [("clients", "a round", "s/round", "ms per client", "MiB before", "MiB added by rounds")]
    for population, cohort in cases:
        found = in_a_process(population, cohort, max(1, 10 * options.rounds // cohort))
        seconds, before = found["seconds"], found["before"]
        numbers = (f"{seconds:.2f}", f"{1e3 * seconds / cohort:.1f}", f"{before:.0f}", f"{found['peak'] - before:.0f}")
        table.append((f"{population:,}", f"{cohort:,}", *numbers))
        print(*table[-1], sep="  ", file=sys.stderr)
    show(table)
    if options.write:
        write("scale", {"torch": torch.__version__}, table)


if __name__ == "__main__":
    main()
