"""The tasks on MNIST: the network of Zampling's paper, and that of FedPM on as many images as a CPU can handle.

According to its paper (Isik et al., 2023), FedPM's network for MNIST has four convolutions and 1,933,258 parameters.
That is the Conv-4 of the supermask papers (Zhou et al., 2019) with biases: 3 x 3 convolutions of 64, 64, 128 and 128
channels, each pair followed by max pooling, then 6272-256-256-10.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from digits import mnist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

NUM_CLIENTS = 10
LEAST_GAIN = 1e-4  # the delta of the paper's early stopping


def mnist_fc() -> nn.Module:
    """Return 784-300-100-10, the network of the paper's federated experiments: 266,610 weights."""
    return nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))


def conv4() -> nn.Module:
    """Return Conv-4, FedPM's network for MNIST: 1,933,258 weights."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 28, 28))]
    for c_in, c_out in ((1, 64), (64, 128)):
        for channels in (c_in, c_out):
            layers += [nn.Conv2d(channels, c_out, 3, padding=1), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    sizes = [nn.Linear(128 * 7 * 7, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, nn.Flatten(), *sizes)


@dataclass(frozen=True)
class Task:
    """A network, and the part of MNIST that it sees.

    Attributes:
        net: Makes the network, from images of shape ``(batch, 784)`` to logits.
        batch_size: Batch size of local steps.
        train_stride: Clients share every ``train_stride``-th training image.
        test_stride: The network is tested on every ``test_stride``-th test image.
        num_samples: Number of sampled networks that are tested at the end.
        patience: Number of local epochs without a lower loss after which a client stops; 0 for no early stopping.
    """

    net: Callable[[], nn.Module]
    batch_size: int
    train_stride: int = 1
    test_stride: int = 1
    num_samples: int = 100
    patience: int = 0


TASKS = {
    "MNISTFC": Task(mnist_fc, batch_size=128),
    "MNISTFC, early stopping": Task(mnist_fc, batch_size=128, patience=10),
    "MNISTFC, 5,000 images": Task(mnist_fc, batch_size=128, train_stride=12),
    # 500 images per client, 2,000 for testing: a forward and backward pass takes 7 ms per image on one core
    "Conv-4": Task(conv4, batch_size=16, train_stride=12, test_stride=5, num_samples=5),
}


class Classifier(pl.LightningModule):
    """A network that is trained with Adam.

    With a ``patience``, a client stops after so many local epochs in which its mean training loss was not lower by
    `LEAST_GAIN` than in the best one. These attributes are put back before every client.
    """

    def __init__(self, net: nn.Module, lr: float, decay_rounds: int = 0, patience: int = 0) -> None:
        super().__init__()
        self.net, self.lr, self.decay_rounds, self.patience = net, lr, decay_rounds, patience
        self.losses: list[Tensor] = []
        self.least, self.waited = math.inf, 0

    def on_train_batch_start(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> int | None:
        return -1 if 0 < self.patience <= self.waited else None  # this epoch, like all that follow, has no step

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.patience:
            self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        if self.losses:
            mean = float(torch.stack(self.losses).mean())
            self.waited = 0 if mean < self.least - LEAST_GAIN else self.waited + 1
            self.least = self.least if self.waited else mean
            self.losses = []

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.parameters(), lr=self.lr)
        if not self.decay_rounds:
            return adam
        return [adam], [torch.optim.lr_scheduler.CosineAnnealingLR(adam, T_max=self.decay_rounds)]


def deal(task: Task, seed: int = 0) -> ls.FederatedDataModule:
    """Return the images of a task, dealt to ten clients at random; the test images form one batch."""
    x, y, test_x, test_y = mnist()
    test = TensorDataset(test_x[:: task.test_stride], test_y[:: task.test_stride])
    return ls.FederatedDataModule(
        TensorDataset(x[:: task.train_stride], y[:: task.train_stride]),
        ls.IIDPartitioner(num_clients=NUM_CLIENTS),
        val=test,
        batch_size=task.batch_size,
        eval_batch_size=len(test),
        seed=seed,
    )
