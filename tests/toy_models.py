"""The small modules that most tests train, their examples, and an algorithm that stores something of each client."""

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral.algorithms.fed_avg import DenseRound
from lightning_spectral.protocol.records import Receipt, Upload


def toy_examples(number: int = 120) -> TensorDataset:
    """Six features each, and one of three labels that follows from them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 6, generator=generator)
    return TensorDataset(x, (x @ torch.randn(6, 3, generator=generator)).argmax(1))


class LitNet(pl.LightningModule):
    """Any network, trained by cross-entropy and SGD."""

    def __init__(self, net: nn.Module, lr: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__()
        self.net, self.sgd = net, {"lr": lr, "momentum": momentum}

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], **self.sgd)


class LitMLP(pl.LightningModule):
    """A typical module of a user: metrics, dropout, momentum, a schedule."""

    def __init__(self, lr: float = 0.1, momentum: float = 0.9, dropout: float = 0.1, width: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.Dropout(dropout), nn.ReLU(), nn.Linear(width, 3)
        )
        self.train_acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(3, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log_dict({"train_acc": self.train_acc})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch: Any) -> None:
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=self.hparams.momentum)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


def step_by_hand(module: Any, loss: Tensor) -> None:
    """Take a step of all optimizers of a module with manual optimisation."""
    for optimizer in module.optimizers():
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()


class LitHalves(LitMLP):
    """Steps its two halves itself, one after the other, each with an optimizer and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        step_by_hand(self, loss)
        return loss

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        halves = [
            torch.optim.SGD(self.net[:2].parameters(), lr=0.1, momentum=0.9),
            torch.optim.AdamW(self.net[2:].parameters(), lr=0.01),
        ]
        return halves, [torch.optim.lr_scheduler.StepLR(half, 1, 0.5) for half in halves]


class LitSmall(LitMLP):
    """Has an example input, by default no dropout, and a BatchNorm whose averages are shared."""

    example_input_array = torch.zeros(2, 6)

    def __init__(self, momentum: float = 0.9, dropout: float = 0.0) -> None:
        super().__init__(momentum=momentum, dropout=dropout)
        self.net.insert(1, nn.BatchNorm1d(12))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[0]) == 1 else super().training_step(batch, batch_idx)


class LitFrozenParts(LitSmall):
    """A bias that travels once, and a frozen layer that is cut or chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].requires_grad_(False)
        self.net[6].bias.requires_grad_(False)


class Detour(nn.Module):
    """Registers its layers in another order than it runs them, and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.mid = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.unused = nn.Linear(4, 4)
        self.stem = nn.Linear(3, 4)

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        x = self.mid(self.stem(x))
        return self.head(self.mid(x) if twice else x)


class RememberingRound(DenseRound):
    def add(self, receipt: Receipt, upload: Upload) -> None:
        store, unit = self.cohort.store, receipt.unit
        turns = store[unit]["turns"] + 1 if unit in store else torch.tensor(1)
        self.mean.add(upload.tensors, unit.coefficient / int(turns))
        store[unit] = {"loss": torch.tensor(upload.loss, dtype=torch.float64), "turns": turns}


class Remembering(ls.FedAvg):
    """Keeps each client's last loss at the server, and gives a client less weight the more often it has trained."""

    round = RememberingRound
