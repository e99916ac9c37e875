"""How far clients move their probabilities at each learning rate, and what they learn: where a run warns, and why.

    python studies/zampling/rates.py     # prints a table; some minutes

Ten clients with 600 images of MNIST each train 784-300-100-10 at compression 32, in batches of 32.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from tasks import NUM_CLIENTS, Classifier, Task, deal, mnist_fc

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from quiet import quiet_trainer, silence_lightning

import lightning_spectral as ls
from lightning_spectral.algorithms.zampling import hardly_moved

TASK = Task(mnist_fc, batch_size=32, train_stride=10, test_stride=5)
COMPRESSION, NUM_ROUNDS = 32, 15
RATES = {"Adam": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3), "SGD": (0.01, 0.1, 1.0, 10.0, 100.0)}


@dataclass(frozen=True)
class Outcome:
    """What a run did.

    Attributes:
        moved: How far a client moved a probability in the first round, root mean square.
        accuracy: Test accuracy of the expected network after the last round.
    """

    moved: float
    accuracy: float


class Either(Classifier):
    """Trains with Adam or SGD."""

    def __init__(self, net: torch.nn.Module, lr: float, optimizer: str) -> None:
        super().__init__(net, lr)
        self.optimizer = getattr(torch.optim, optimizer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.optimizer(self.parameters(), lr=self.lr)
        return optimizer


def train(optimizer: str, lr: float, task: Task = TASK, num_rounds: int = NUM_ROUNDS) -> Outcome:
    """Train a federation."""
    torch.manual_seed(0)
    algorithm = ls.Zampling(COMPRESSION)
    model = ls.FederatedModule(Either(task.net(), lr, optimizer), algorithm=algorithm, clients_per_round=NUM_CLIENTS)
    history = ls.RoundHistory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the table says where a run warns
        quiet_trainer(num_rounds, [history], every=num_rounds).fit(model, deal(task))
    return Outcome(history.rows[0]["fl/probs_moved"], history.rows[-1]["accuracy"])


def row(optimizer: str, lr: float, done: Outcome) -> str:
    """Return a line of the table."""
    warns = "yes" if hardly_moved(done.moved, NUM_CLIENTS) else ""
    return f"| {optimizer} | {lr:g} | {done.moved:.3f} | {warns} | {100 * done.accuracy:.1f} |"


def main() -> None:
    silence_lightning()
    torch.set_num_threads(1)
    print("| optimizer | learning rate | moved in round 0 | warns | accuracy, % |\n| --- | --- | --- | --- | --- |")
    for optimizer, rates in RATES.items():
        for lr in rates:
            print(row(optimizer, lr, train(optimizer, lr)), flush=True)


if __name__ == "__main__":
    main()
