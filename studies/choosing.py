"""What a round is, and clients that differ: the tables of docs/choosing.md; half an hour on one core of a CPU.

    python studies/choosing.py

Prints test accuracy on scikit-learn's digits in per cent, over three seeds: by cohort at equal bytes, by local epochs,
and, for methods against drift, also on the clients' own examples.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

sys.path.append(str(Path(__file__).parent))
from quiet import quiet_trainer, silence_lightning

import lightning_spectral as ls

SEEDS, LR, BATCH_SIZE, KEEP_RATIO = range(3), 0.1, 10, 0.2
SKEWED = ls.DirichletPartitioner(num_clients=50, alpha=1.0)
APART = ls.DirichletPartitioner(num_clients=20, alpha=0.1)
SYSTEMS: dict[str, tuple[Any, list[Any]]] = {
    "`FedAvg()`": (ls.FedAvg(), []),
    "`Scaffold()`": (ls.Scaffold(), []),
    "`FedDyn(alpha=0.1)`": (ls.FedDyn(alpha=0.1), []),
    "`QFedAvg(q=0.2, lipschitz=0.3)`": (ls.QFedAvg(q=0.2, lipschitz=0.3), []),
    "`Ditto(pull=0.1)`, own models": (ls.Ditto(pull=0.1), []),
    "personal heads, own models": (ls.FedAvg(), [ls.Personal(["net.4.*"])]),
}


class LitMLP(pl.LightningModule):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR, momentum=self.momentum)


def trained(
    algorithm: Any, clients: Any, seed: int, num_rounds: int, *, momentum: float, held_out: float = 0.0, **options: Any
) -> tuple[list[float], list[float]]:
    """Return test accuracy by round, and that of each client's model on its own held-out examples."""
    torch.manual_seed(seed)  # the initial weights
    images, digits = load_digits(return_X_y=True)
    examples = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(digits))
    train, test = random_split(examples, [1500, 297], torch.Generator().manual_seed(seed))
    data = ls.FederatedDataModule(
        train, clients, val=test, batch_size=BATCH_SIZE, client_val_fraction=held_out, seed=seed
    )
    model = ls.FederatedModule(LitMLP(momentum), algorithm=algorithm, seed=seed, **options)
    history, own = ls.RoundHistory(), ls.ClientEvaluation()
    quiet_trainer(num_rounds, [history, own] if held_out else [history], every=1).fit(model, data)
    rows = own.table.rows if held_out else []
    return history.column("accuracy"), [row.metrics.get("own/accuracy", row.metrics["accuracy"]) for row in rows]


def spread(values: Sequence[float], digits: int) -> str:
    return f"{100 * fmean(values):.{digits}f} ± {100 * stdev(values):.{digits}f}"


def row(name: str, num_rounds: int, **options: Any) -> str:
    """Return a row of the mean of the last ten rounds, for `FedAvg` and for sharding."""
    cells = []
    for algorithm in (ls.FedAvg(), ls.SpectralSharding(keep_ratio=KEEP_RATIO)):
        options |= {"server_optimizer": ls.BoundedMomentum(), "momentum": 0.9}
        rounds = [trained(algorithm, SKEWED, seed, num_rounds, **options)[0] for seed in SEEDS]
        cells.append(spread([fmean(values[-10:]) for values in rounds], 1))
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    silence_lightning()
    print("| clients a round, rounds | FedAvg | sharding |\n| --- | --- | --- |")
    for cohort, num_rounds in ((5, 120), (10, 60), (20, 30)):
        print(row(f"{cohort}, {num_rounds}", num_rounds, clients_per_round=cohort, local_epochs=2))
    print("\n| local epochs | FedAvg | sharding |\n| --- | --- | --- |")
    for local_epochs in (1, 2, 4, 8):
        print(row(str(local_epochs), 30, clients_per_round=10, local_epochs=local_epochs))
    print("\n| | test data | own examples, mean | worst tenth of clients |\n| --- | --- | --- | --- |")
    apart: dict[str, Any] = {"held_out": 0.25, "momentum": 0.0, "clients_per_round": 10, "local_epochs": 5}
    for name, (algorithm, filters) in SYSTEMS.items():
        runs = [trained(algorithm, APART, seed, 40, filters=filters, **apart) for seed in SEEDS]
        owns = [sorted(own) for _, own in runs]
        columns = (
            [fmean(rounds[-5:]) for rounds, _ in runs],
            [fmean(own) for own in owns],
            [o[len(o) // 10] for o in owns],
        )
        print(f"| {name} | {' | '.join(spread(column, 0) for column in columns)} |")


if __name__ == "__main__":
    main()
