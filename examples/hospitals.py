"""Eight hospitals learn to tell malignant tumours from benign ones together, and each patient is hidden.

    pip install -e ".[examples,privacy,report]"
    python examples/hospitals.py

Each hospital has a CSV file of 24 to 180 patients, made of scikit-learn's data on breast cancer, and holds out a third
of them. The table compares five models on the held-out patients of each hospital: its own, one of all patients in one
place, one of federated averaging, the same with each patient hidden at epsilon 8, and one that the other hospitals
made. In brackets are 95 % intervals. The files and a page to print are in ``outputs/hospitals``.
"""

import argparse
import warnings
from functools import partial
from pathlib import Path

import pandas as pd
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.models import LitClassifier
from lightning_spectral.report.page import write_report

PATIENTS = {"Ulm": 24, "Graz": 30, "Bern": 42, "Lyon": 54, "Porto": 63, "Turin": 75, "Ghent": 101, "Paris": 180}
OUTPUT = Path("outputs/hospitals")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    warnings.filterwarnings("ignore", ".*LeafSpec")
    OUTPUT.mkdir(parents=True, exist_ok=True)
    everybody, first = load_breast_cancer(as_frame=True).frame.sample(frac=1.0, random_state=0), 0
    for name, number in PATIENTS.items():
        everybody[first : (first := first + number)].to_csv(OUTPUT / f"{name}.csv", index=False)

    frame = pd.concat({name: pd.read_csv(OUTPUT / f"{name}.csv") for name in PATIENTS})
    classes, hospitals = torch.tensor(frame.pop("target").to_numpy()), frame.index.get_level_values(0)
    scaled = torch.tensor(frame.to_numpy() / load_breast_cancer().data.max(0))  # published, so scaling tells nothing
    patients, owners = TensorDataset(scaled.float() * 4 - 2, classes), ls.NaturalPartitioner(hospitals)
    data = ls.FederatedDataModule(patients, owners, batch_size=16, client_val_fraction=1 / 3, stratified=True)
    together = partial(ls.FederatedModule, participation=ls.FullParticipation())
    hidden = ls.ExamplePrivacy(clip=1.0, delta=1e-4, target_epsilon=8.0, num_epochs=rounds)
    tables = ls.compare_clients(
        lambda: LitClassifier(nn.Linear(30, 2), num_classes=2, momentum=0.0),
        data,
        OUTPUT,
        trainer={"max_epochs": rounds, "accelerator": "cpu"},
        federated={"together": together, "hidden": partial(together, filters=[hidden])},
    )
    print(tables["val_accuracy"])
    for name, value in tables["val_accuracy"].figures().items():
        if name.endswith("weighted_mean"):
            print(f"{value:.1%} of all held-out patients: {name}")
    write_report([OUTPUT / "together", OUTPUT / "hidden"], OUTPUT / "report.html")


if __name__ == "__main__":
    main()
