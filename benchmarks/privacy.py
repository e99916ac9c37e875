"""Accuracy at equal epsilon: federated averaging beside spectral sharding, with noise on factors and on matrices.

    python benchmarks/privacy.py

The README's network, twice as wide, on scikit-learn's digits: 1,500 images dealt evenly to 250 clients, of whom 50 are
expected in each of 40 rounds, with 3 local epochs; delta is 1e-4. Every system has the best clip and learning rate of a
grid for each epsilon, by its test accuracy with seed 0; the search itself is not counted. Accuracies are means of the
last five rounds, over three seeds. Runs are kept in ``privacy.jsonl``, and only those that are missing are made.
"""

import argparse
import itertools
import json
import statistics
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from page import show
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset, random_split

import lightning_spectral as ls
from lightning_spectral.algorithms import TermMeans
from lightning_spectral.plugin.trainer import silence, silent_trainer

NUM_CLIENTS, ACTIVE, ROUNDS, DELTA, SEEDS = 250, 50, 40, 1e-4, 3
WIDTH, KEEP_RATIO = 256, 0.1
SYSTEMS = {
    "FedAvg": ls.FedAvg(),
    "sharding, noise on factors": ls.SpectralSharding(ls.TopN(), KEEP_RATIO, aggregation=TermMeans()),
    "sharding, noise on matrices": ls.SpectralSharding(ls.TopN(), KEEP_RATIO),
}
EPSILONS = (2.0, 8.0, None)  # no privacy, with the same sampling
CLIPS, RATES = (0.1, 0.3, 1.0), (0.1, 0.3)  # in units of the weights; of clients


class LitMLP(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        hidden = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.net = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class LastRounds(pl.Callback):
    """The mean accuracy of the last five rounds."""

    def __init__(self):
        self.found = []

    def on_validation_end(self, trainer, pl_module):
        self.found.append(float(trainer.callback_metrics["accuracy"]))

    @property
    def accuracy(self):
        return statistics.fmean(self.found[-5:])


def trained(system, epsilon, clip, lr, seed):
    """Test accuracy, and how many numbers get noise."""
    torch.manual_seed(seed)
    images, digits = load_digits(return_X_y=True)
    examples = TensorDataset(torch.tensor(images / 16).float(), torch.tensor(digits))
    train, test = random_split(examples, [1500, 297], torch.Generator().manual_seed(seed))
    privacy = None
    if epsilon is not None:
        privacy = ls.ClientPrivacy(clip=clip, delta=DELTA, target_epsilon=epsilon, num_rounds=ROUNDS, noise_seed=seed)
    model = ls.FederatedModule(
        LitMLP(lr),
        algorithm=SYSTEMS[system],
        participation=ls.Uniform(active=ACTIVE),
        local_epochs=3,
        privacy=privacy,
        seed=seed,
    )
    data = ls.FederatedDataModule(train, ls.IIDPartitioner(NUM_CLIENTS), val=test, batch_size=6, eval_batch_size=297)
    last = LastRounds()
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ls.SpectralWarning)  # of noise that is larger than a weight
        silent_trainer(max_epochs=ROUNDS, accelerator="cpu", devices=1, callbacks=[last]).fit(model, data)
    return last.accuracy


class Kept:
    """Runs in a file, one line each."""

    def __init__(self, path):
        self.path = path
        self.found = dict(map(json.loads, path.read_text().splitlines())) if path.exists() else {}

    def __call__(self, *run):
        key = json.dumps(run)
        if key not in self.found:
            self.found[key] = trained(*run)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self.found[key]]) + "\n")
            print(key, f"{self.found[key]:.3f}", flush=True)
        return self.found[key]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path(__file__).with_suffix(".jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = Kept(options.file)
    rows = [("", *("no noise" if e is None else f"epsilon {e:g}" for e in EPSILONS))]
    for system in SYSTEMS:
        cells = []
        for epsilon in EPSILONS:
            grid = itertools.product(CLIPS if epsilon else CLIPS[:1], RATES)
            best = max(grid, key=lambda choice, e=epsilon, s=system: run(s, e, *choice, 0))
            found = [100 * run(system, epsilon, *best, seed) for seed in range(SEEDS)]
            chosen = f"clip {best[0]:g}, " if epsilon else ""
            cells.append(f"{statistics.fmean(found):.1f} ± {statistics.stdev(found):.1f} ({chosen}lr {best[1]:g})")
        rows.append((system, *cells))
    show(rows)


if __name__ == "__main__":
    main()
