"""The tasks on MNIST: the network of Zampling's paper, and that of FedPM on as many images as a CPU can handle.

According to its paper (Isik et al., 2023), FedPM's network for MNIST has four convolutions and 1,933,258 parameters.
That is the Conv-4 of the supermask papers (Zhou et al., 2019) with biases: 3 x 3 convolutions of 64, 64, 128 and 128
channels, each pair followed by max pooling, then 6272-256-256-10.
"""

from __future__ import annotations

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
    """

    net: Callable[[], nn.Module]
    batch_size: int
    train_stride: int = 1
    test_stride: int = 1
    num_samples: int = 100


TASKS = {
    "MNISTFC": Task(mnist_fc, batch_size=128),
    # 500 images per client, 2,000 for testing: a forward and backward pass takes 7 ms per image on one core
    "Conv-4": Task(conv4, batch_size=16, train_stride=12, test_stride=5, num_samples=5),
}


class Classifier(pl.LightningModule):
    """A network that is trained with Adam."""

    def __init__(self, net: nn.Module, lr: float, decay_rounds: int = 0) -> None:
        super().__init__()
        self.net, self.lr, self.decay_rounds = net, lr, decay_rounds

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

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
