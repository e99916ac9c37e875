"""Three models of Fashion-MNIST on 120 clients, as in the slides: few labels each, and few clients with most images.

Each model has its own 12,000 images at 14 x 14 pixels; all are tested on the same 10,000. A client has three of ten
labels. For each model a tenth of the clients are ten times as likely to get an image as the others: they hold half of
the images; it would be 52.6 % if all clients had the same labels.
A tenth of the clients have no images of one model. Half have two processors, a quarter three, a quarter one.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from images import whole_fashion_mnist

import lightning_spectral as ls

NUM_CLIENTS, NUM_LABELS, LABELS_OF_A_CLIENT = 120, 10, 3
NUM_TRAIN = 12_000  # images of each model
MODELS = ("first", "second", "third")
RICH = 10.0  # how many times as likely some clients are to get an image
PROCESSORS = {3: 0.25, 2: 0.5, 1: 0.25}
LOCAL_EPOCHS, BATCH_SIZE = 5, 500


class Classifier(pl.LightningModule):
    """A network that is trained with plain SGD, as `Scaffold` requires."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.net = net
        self.lr = lr

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def perceptron() -> nn.Module:
    """Return a network from 784 / 4 pixels to 10 classes, with one hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 100), nn.ReLU(), nn.Linear(100, NUM_LABELS))


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return all images and labels, for training and for testing."""
    return whole_fashion_mnist()


def deal(seed: int) -> ls.MultiModelDataModule:
    """Return the data of all models, dealt to the clients."""
    generator = torch.Generator().manual_seed(seed)
    lacks = lacked_model(len(MODELS), generator)
    x, y, test_x, test_y = images()
    order = torch.randperm(len(y), generator=generator)
    modules = {}
    for index, name in enumerate(MODELS):
        own = order[index * NUM_TRAIN : (index + 1) * NUM_TRAIN]
        owners = owners_of(y[own], lacks == index, generator)
        modules[name] = dealt(x[own], y[own], owners, TensorDataset(test_x, test_y))
    return ls.MultiModelDataModule(modules)


def dealt(x: Tensor, y: Tensor, owners: Tensor, val: TensorDataset) -> ls.FederatedDataModule:
    """Return the data of one model; ``owners`` are the clients of its examples, ``val`` is its test set."""
    return ls.FederatedDataModule(
        TensorDataset(x, y),
        ls.NaturalPartitioner(owners, names=range(NUM_CLIENTS)),
        val=val,
        batch_size=BATCH_SIZE,
        eval_batch_size=len(val),
    )


def lacked_model(num_models: int, generator: torch.Generator) -> Tensor:
    """Return the model of which each client has no examples, -1 for nine in ten clients; shape ``(NUM_CLIENTS,)``."""
    lacks = torch.full((NUM_CLIENTS,), -1)
    without = torch.randperm(NUM_CLIENTS, generator=generator)[: NUM_CLIENTS // 10]
    lacks[without] = torch.randint(num_models, (len(without),), generator=generator)
    return lacks


def owners_of(labels: Tensor, lacking: Tensor, generator: torch.Generator) -> Tensor:
    """Return the client that gets each image.

    Args:
        labels: Class of each image, shape ``(n,)``.
        lacking: Which clients get none, shape ``(NUM_CLIENTS,)``.
        generator: Source of randomness.
    """
    wealth = torch.ones(NUM_CLIENTS)
    wealth[torch.randperm(NUM_CLIENTS, generator=generator)[: NUM_CLIENTS // 10]] = RICH
    wealth[lacking] = 0.0
    has = torch.rand(NUM_CLIENTS, NUM_LABELS, generator=generator).argsort(1) < LABELS_OF_A_CLIENT
    chances = wealth[:, None] * has  # (client, label)
    return torch.multinomial(chances.T[labels], 1, generator=generator).squeeze(1)
