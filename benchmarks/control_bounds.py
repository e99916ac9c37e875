"""What `control_bound` costs honest clients, and what one liar of twelve can do in spite of it; some minutes.

    python benchmarks/control_bounds.py

Digits of scikit-learn, dealt to twelve clients by Dir(0.3 p), of which six take part in each of 100 rounds. Prints the
test accuracy in per cent, a mean over the last three rounds and over three seeds, of honest clients, the share of the
data whose controls are shortened, and the accuracy where the first client sends back noise as long as its update is
allowed to be.
"""

from __future__ import annotations

import logging
import warnings
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

NUM_CLIENTS, COHORT, NUM_ROUNDS, SEEDS, NUM_TEST = 12, 6, 100, 3, 400
BOUNDS = (None, 10.0, 3.0, 2.0, 1.0)
LIAR = ls.Attack("noise", strength=100.0, clients=[0])


class LitMLP(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def outcome(algorithm: ls.Algorithm, lies: bool, seed: int) -> tuple[float, float]:
    """The test accuracy, and the share of the data whose controls are shortened, in per cent."""
    torch.manual_seed(seed)
    x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    test, train = (TensorDataset(x[part].float() / 16.0, y[part]) for part in order.tensor_split([NUM_TEST]))
    data = ls.FederatedDataModule(train, ls.DirichletPartitioner(NUM_CLIENTS, 0.3), val=test, batch_size=16, seed=seed)
    filters: list[Any] = [ls.UsualUpdateNorm(), *([LIAR] if lies else [])]
    options: dict[str, Any] = {"clients_per_round": COHORT, "local_epochs": 2, "seed": seed, "filters": filters}
    history = ls.RoundHistory()
    trainer = pl.Trainer(
        max_epochs=NUM_ROUNDS,
        accelerator="cpu",
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ls.FederatedModule(LitMLP(), algorithm=algorithm, **options), data)
    shortened = history.rows[-1].get("fl/controls_shortened", 0.0)
    return 100.0 * fmean(history.column("accuracy")[-3:]), 100.0 * shortened


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print("| | `control_bound` | honest | shortened | a liar |\n|" + 5 * " --- |")
    for bound in BOUNDS:
        for algorithm in (ls.Scaffold(control_bound=bound), ls.FedDyn(alpha=0.1, control_bound=bound)):
            honest = [fmean(each) for each in zip(*(outcome(algorithm, False, s) for s in range(SEEDS)), strict=True)]
            lied_to = fmean(outcome(algorithm, True, s)[0] for s in range(SEEDS))
            cells = f"{honest[0]:.1f} | {honest[1]:.0f} | {lied_to:.1f}"
            print(f"| {type(algorithm).__name__} | {bound} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
