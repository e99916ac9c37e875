"""Writes a small app for Flower, which trains from the start and is meant to be changed."""

from __future__ import annotations

from pathlib import Path

PYPROJECT = """\
# What `flwr run` reads. Dependencies are installed on each machine beforehand, so none are listed here.
[project]
name = "{name}"
version = "0.1.0"
description = "Federated learning of a sharded model"
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:device"

# Settings of a run; change them with `flwr run --run-config 'rounds=100'`. `resume` names a checkpoint to go on from.
[tool.flwr.app.config]
rounds = 3
clients = 3
folder = "{folder}"
resume = ""
"""

APP = '''\
"""A federation over Flower: the server's half and the device's half of one run."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
import lightning_spectral.network as net

KEEP_RATIO = 0.5


class LitMLP(pl.LightningModule):
    """Your module, as any Trainer would fit it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
        self.example_input_array = torch.zeros(2, 20)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_acc", (self(x).argmax(1) == y).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def examples(seed, number=400):
    """Made-up data, in place of a device's own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(number, 20, generator=generator)
    return TensorDataset(x, (x @ torch.randn(20, 4, generator=torch.Generator().manual_seed(0))).argmax(1))


def federation(config):
    """What the server trains, as in a simulation."""
    algorithm = ls.SpectralSharding(keep_ratio=KEEP_RATIO)
    return ls.FederatedModule(LitMLP(), algorithm=algorithm, clients_per_round=config["clients"], local_epochs=2)


def trainer(config):
    """The server's Trainer; it writes a checkpoint after every round, from which `resume` goes on."""
    saving = pl.callbacks.ModelCheckpoint(config["folder"], save_last=True)
    options = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return pl.Trainer(max_epochs=config["rounds"], accelerator="cpu", callbacks=[saving], **options)


def client(config):
    """A device's own data; `client` is an entry of its node's configuration."""
    return net.ClientData(examples(seed=1 + int(config["client"])), batch_size=20, keep_ratio=KEEP_RATIO)


server = net.server_app(federation, trainer, val=examples(seed=1000))
device = net.client_app(LitMLP, client)
'''


def write_app(folder: Path) -> None:
    """Write an app into a new folder.

    Args:
        folder: Must not exist, or be empty.

    Raises:
        FileExistsError: If there is something in it.
    """
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    name, results = folder.resolve().name.lower(), (folder.resolve() / "results").as_posix()
    (folder / "app.py").write_text(APP)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(name=name, folder=results))
