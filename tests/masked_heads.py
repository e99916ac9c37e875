"""A module whose head masks by the classes of a client, by hand or not at all, and clients that lack some classes."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.client.batches import BatchSource, ClientData

# No client has class 4; client 3 has all others. Each client has three examples of each of its classes.
OWN = ((0, 1), (1, 2), (3,), (0, 1, 2, 3))


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


def present(*classes: int) -> ClientData:
    """The data of a client that has an example of each of some classes."""
    labels = torch.tensor(classes)
    return ClientData(BatchSource(TensorDataset(labels)), torch.arange(len(labels)), 1, 0, (), labels=lambda: labels)


def masked(layer: nn.Module, x: Tensor, *classes: int) -> Tensor:
    """The output of a layer while a client that has only the given classes trains."""
    with ls.client.MaskedLogits("", absent=7.0).while_training(layer, present(*classes)):
        out: Tensor = layer(x)
    return out
