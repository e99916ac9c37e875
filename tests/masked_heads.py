"""A module whose head masks by the classes of a client, by hand or not at all, and clients that lack some classes."""

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from federation import Fit, same_state, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseSide
from lightning_spectral.client import LocalHook
from lightning_spectral.client.batches import BatchSource, ClientData
from lightning_spectral.client.device import Device, Instructions
from lightning_spectral.client.local_loop import LocalSettings
from lightning_spectral.client.user_optimizer import options_of
from lightning_spectral.protocol.records import Download, Upload

# No client has class 4; client 3 has all others. Each client has three examples of each of its classes.
OWN = ((0, 1), (1, 2), (3,), (0, 1, 2, 3))

ALGORITHMS: dict[str, Any] = {
    "FedAvg": ls.FedAvg(),
    "spectral": ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}),
    "the head in terms": ls.SpectralSharding(keep_ratio=0.5, layers=ls.LayerChoices(keep_first_and_last_dense=False)),
    "FIARSE": ls.FIARSE({0.25: 0.5, 1.0: 0.5}),
    "Zampling": ls.Zampling(2, degree=3),
    "LoRA": ls.LoRA({1: 0.5, 3: 0.5}, alpha=1.0),
    "SCAFFOLD": ls.Scaffold(),
}


class LitHead(pl.LightningModule):
    """Five logits from six features; a seventh holds the client's id, used only by modules that mask by hand."""

    example_input_array = torch.zeros(2, 7)

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh())
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.net(x[:, :6]))

    def loss(self, logits: Tensor, y: Tensor, client_id: int) -> Tensor:
        return F.cross_entropy(logits, y)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        loss = self.loss(self(x), y, int(x[0, 6]))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class LitZeros(LitHead):
    """Masks by hand, as HeteroFL's code does."""

    def loss(self, logits: Tensor, y: Tensor, client_id: int) -> Tensor:
        mask = torch.zeros(5)
        mask[list(OWN[client_id])] = 1
        return F.cross_entropy(torch.where(mask == 0, torch.zeros(()), logits), y)


class LitPresent(LitHead):
    """The cross-entropy of the present classes only, which are renumbered."""

    def loss(self, logits: Tensor, y: Tensor, client_id: int) -> Tensor:
        own = list(OWN[client_id])
        return F.cross_entropy(logits[:, own], torch.tensor([own.index(int(label)) for label in y]))


def clients(own: Any = OWN, **options: Any) -> ls.FederatedDataModule:
    """Three examples of each class that a client has."""
    keys = [client_id for client_id, classes in enumerate(own) for _ in range(3 * len(classes))]
    y = torch.tensor([c for classes in own for c in classes for _ in range(3)])
    x = torch.randn(len(y), 6, generator=torch.Generator().manual_seed(1)) + 0.3 * y[:, None]
    train = TensorDataset(torch.cat([x, torch.tensor(keys)[:, None]], 1), y)
    return ls.FederatedDataModule(train, ls.NaturalPartitioner(keys), val=train, batch_size=2, **options)


def check_by_hand(fit: Fit, by_hand: type[LitHead], hook: LocalHook, **options: Any) -> None:
    """Fail unless a hook does to the bit what a module does by hand, and does something."""
    ours = fit(seeded(LitHead), clients(), local_hooks=[hook], **options)
    expected = fit(seeded(by_hand), clients(), **options)
    assert same_state(ours.tensors, expected.tensors)
    assert ours.rows == expected.rows
    assert not same_state(ours.state, fit(seeded(LitHead), clients(), **options).state)


def device_of(lit: pl.LightningModule, data: ls.FederatedDataModule, *hooks: LocalHook) -> Device:
    """A device that trains all parameters of a module."""
    names = tuple(name for name, _ in lit.named_parameters())
    own: Any = lit.configure_optimizers()
    return Device(lit, Instructions(DenseSide(names)), [own], data.client_data, LocalSettings(local_hooks=hooks))


def turn(device: Device, asked: Download) -> Upload:
    """What a device sends back of a client that begins with the module's weights."""
    options = tuple(map(options_of, device.optimizers))
    upload = device.run(replace(asked, tensors=dict(device.module.state_dict()), options=options))
    assert upload.failure is None
    return upload


def train_by_hand(lit: Any, data: ls.FederatedDataModule, asked: Download, change: Any = lambda x: x) -> None:
    """The same without the package's loop: batches, logits that are changed, loss, gradient, step."""
    optimizer = lit.configure_optimizers()
    for local_epoch in range(asked.local_epochs):
        for (x, y), _ in data.client_data(asked).epoch(local_epoch):
            optimizer.zero_grad()
            F.cross_entropy(change(lit(x)), y).backward()
            optimizer.step()


def present(*classes: int) -> ClientData:
    """The data of a client that has an example of each of some classes."""
    labels = torch.tensor(classes)
    return ClientData(BatchSource(TensorDataset(labels)), torch.arange(len(labels)), 1, 0, (), labels=lambda: labels)


def masked(layer: nn.Module, x: Tensor, *classes: int) -> Tensor:
    """The output of a layer while a client that has only the given classes trains."""
    with ls.MaskedLogits("", absent=7.0).while_training(layer, present(*classes)):
        out: Tensor = layer(x)
    return out
