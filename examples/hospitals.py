"""Eight hospitals learn to tell malignant tumours from benign ones together, and each patient is hidden.

    pip install -e ".[examples,privacy,report]"
    python examples/hospitals.py

Each hospital has a CSV file of 24 to 180 patients, made of scikit-learn's data on breast cancer, and holds out a third
of them. The table compares five models on the held-out patients of each hospital: its own, one of all patients in one
place, one of federated averaging, the same with each patient hidden at epsilon 8, and one that the other hospitals
made. In brackets are 95 % intervals. The files and a page to print are in ``outputs/hospitals``.
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import lightning_spectral as ls
from lightning_spectral.plugin.callbacks import ClientRow, ClientTable
from lightning_spectral.report.page import write_report

PATIENTS = {"Ulm": 24, "Graz": 30, "Bern": 42, "Lyon": 54, "Porto": 63, "Turin": 75, "Ghent": 101, "Paris": 180}
OUTPUT, BATCH = Path("outputs/hospitals"), 16


class LitTumour(pl.LightningModule):
    """Logistic regression on thirty measurements of a tumour."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(30, 2)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def write_files() -> None:
    frame = load_breast_cancer(as_frame=True).frame.sample(frac=1.0, random_state=0)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for name, number in PATIENTS.items():
        frame.head(number).to_csv(OUTPUT / f"{name}.csv", index=False)
        frame = frame.iloc[number:]


def read_files() -> tuple[TensorDataset, pd.Series]:
    """All patients, and the hospital of each; the largest measurements are published, so scaling tells nothing."""
    files = {name: pd.read_csv(OUTPUT / f"{name}.csv") for name in PATIENTS}
    frame = pd.concat(files, names=["hospital"]).reset_index("hospital").reset_index(drop=True)
    names, classes = frame.pop("hospital"), torch.tensor(frame.pop("target").to_numpy())
    scaled = torch.tensor(frame.to_numpy() / load_breast_cancer().data.max(0))
    return TensorDataset(scaled.float() * 4 - 2, classes), names


def fitted(rounds: int, model: pl.LightningModule, *data, callbacks=(), **options) -> None:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    every = {"check_val_every_n_epoch": max(1, rounds // 20), "num_sanity_val_steps": 0}
    trainer = pl.Trainer(max_epochs=rounds, accelerator="cpu", callbacks=[*callbacks], **every, **quiet)
    trainer.fit(model, *data, **options)


def centrally(rounds: int, patients: Subset, val: Subset) -> LitTumour:
    module = LitTumour()
    fitted(rounds, module, DataLoader(patients, BATCH, shuffle=True), DataLoader(val, len(val)))
    return module


def together(rounds: int, patients: Subset, val: Subset, names: pd.Series, filters=(), callbacks=()) -> LitTumour:
    module, owners = LitTumour(), names.iloc[patients.indices].tolist()
    model = ls.FederatedModule(module, clients_per_round=len(set(owners)), filters=filters)
    data = ls.FederatedDataModule(patients, ls.NaturalPartitioner(owners), val=val, batch_size=BATCH)
    fitted(rounds, model, callbacks=callbacks, datamodule=data)
    return module


@torch.no_grad()
def accuracy(module: LitTumour, patients: Subset) -> float:
    measured, malignant = zip(*patients, strict=True)
    return float((module.net(torch.stack(measured)).argmax(1) == torch.stack(malignant)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", ".*(does not have many workers|LeafSpec)")
    pl.seed_everything(0, verbose=False)
    write_files()
    patients, names = read_files()
    rank = names.groupby(names).cumcount()
    is_held_out = rank < names.groupby(names).transform("size") // 3

    def of(chosen: pd.Series) -> Subset:
        return Subset(patients, chosen[chosen].index.tolist())

    train, held_out = of(~is_held_out), of(is_held_out)
    hidden = ls.ExamplePrivacy(clip=1.0, delta=1e-4, target_epsilon=8.0, num_epochs=rounds)
    records = {name: ls.RoundHistory(OUTPUT / f"{name}.jsonl") for name in ("together", "hidden")}
    shared = {
        "pooled": centrally(rounds, train, held_out),
        "together": together(rounds, train, held_out, names, callbacks=[records["together"]]),
        "hidden": together(rounds, train, held_out, names, [hidden], [records["hidden"]]),
    }
    rows = []
    for number, name in enumerate(PATIENTS):
        its, own = names == name, of(is_held_out & (names == name))
        alone = centrally(rounds, of(~is_held_out & its), own)
        others = together(rounds, of(~is_held_out & ~its), own, names)
        models = {"alone": alone, **shared, "of the others": others}
        rows.append(
            ClientRow(number, len(own), {f"acc, {kind}": accuracy(one, own) for kind, one in models.items()}, name)
        )
    table = ClientTable(rounds - 1, tuple(rows))
    print(table)
    for kind in table.metrics:
        print(f"{kind}: {table.figures()[f'{kind}/weighted_mean']:.1%} of all held-out patients")
    write_report([OUTPUT / f"{name}.jsonl" for name in records], OUTPUT / "report.html")


if __name__ == "__main__":
    main()
