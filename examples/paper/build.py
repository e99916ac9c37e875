"""Builds what a run trains from its settings: a LightningModule, the clients' data and the federated model."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from settings import Settings
from setups import setup_of
from sources import MissingDataError, Source, source
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls
from lightning_spectral import models
from lightning_spectral.models.vision import BasicBlock

MOMENTUM = 0.9  # in both papers
EVALUATION_BATCH = 500
BETA = 10.0  # concentration over the classes of a superclass, in the 2024 paper's Pachinko allocation


class Federation(NamedTuple):
    """The arguments of `Trainer.fit`, and the module inside the federated model.

    Attributes:
        module: An ordinary LightningModule.
        data: The examples, dealt to clients.
        model: The module, wrapped for training on clients.
    """

    module: models.LitClassifier
    data: ls.FederatedDataModule
    model: ls.FederatedModule


class SmallResNet(nn.Module):
    """A residual net for images of 14 or 16 pixels: ResNet-18's first convolution and two blocks, with GroupNorm.

    Args:
        num_classes: Number of classes.
        in_channels: Number of channels of the image.
        width: Number of channels of the first block; the second has twice as many.
    """

    def __init__(self, num_classes: int, in_channels: int, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, width)
        self.blocks = nn.Sequential(BasicBlock(width, width, 2, 2), BasicBlock(width, 2 * width, 2, 2))
        self.head = nn.Linear(2 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.blocks(torch.relu(self.norm(self.stem(images))))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


Builder = Callable[[int, torch.Size], nn.Module]  # from the number of classes and the shape of an input
MODELS: dict[str, Builder] = {
    "toy": lambda classes, shape: SmallResNet(classes, shape[0], width=8),
    "small-resnet": lambda classes, shape: SmallResNet(classes, shape[0]),
    "small-transformer": lambda classes, shape: models.CharTransformer(
        classes, shape[0], width=48, num_layers=2, dropout=0.0
    ),
    "resnet18": lambda classes, shape: models.ResNet18(classes, shape[0], image_size=shape[1]),
    "cct": lambda classes, shape: models.CCT(classes, shape[0], image_size=shape[1]),
    "transformer": lambda classes, shape: models.CharTransformer(classes, shape[0]),
    "femnist-cnn": lambda classes, shape: models.FEMNISTCNN(
        classes, shape[0], image_size=shape[1], hidden_features=None
    ),
    "small-lstm": lambda classes, shape: models.LSTMClassifier(classes, embedding_dim=32, hidden_size=64),
    "lstm": lambda classes, shape: models.LSTMClassifier(classes),
}
TASKS = {"small-transformer": models.LitNextToken, "transformer": models.LitNextToken}


def build(settings: Settings) -> Federation:
    """Return everything a Trainer needs. Weights and data depend only on the settings.

    Raises:
        MissingDataError: If the data are not available, or cannot be dealt as the settings ask.
    """
    found = source(settings.data)
    data = deal(found, settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        net = MODELS[settings.model](found.num_classes, found.train.tensors[0].shape[1:])
    task = TASKS.get(settings.model, models.LitClassifier)
    module = task(net, found.num_classes, lr=settings.lr, momentum=MOMENTUM, weight_decay=settings.weight_decay)
    module.example_input_array = found.train.tensors[0][:2]  # used to find which channels belong together
    model = ls.FederatedModule(
        module,
        algorithm=setup_of(settings.setup).algorithm(settings.keep_ratio, settings.design, settings.output_ratio),
        clients_per_round=settings.clients_per_round,
        local_epochs=settings.local_epochs,
        seed=settings.seed,
    )
    return Federation(module, data, model)


def deal(found: Source, settings: Settings) -> ls.FederatedDataModule:
    """Return the examples of all clients, and those on which the server's model is tested."""
    order = torch.randperm(len(found.train), generator=torch.Generator().manual_seed(settings.seed))
    chosen = order[: settings.num_train].sort().values
    train = TensorDataset(*(part[chosen] for part in found.train.tensors))
    test = TensorDataset(*(part[: settings.num_test] for part in found.test.tensors))
    return ls.FederatedDataModule(
        train,
        partitioner(found, chosen, settings),
        val=test,
        batch_size=settings.batch_size,
        eval_batch_size=EVALUATION_BATCH,
        seed=settings.seed,
    )


def partitioner(found: Source, chosen: Tensor, settings: Settings) -> ls.partition.Partitioner:
    """Return the partitioner that deals the chosen examples to clients."""
    if settings.split == "iid":
        return ls.IIDPartitioner(settings.num_clients)
    if settings.split == "dirichlet":
        return ls.DirichletPartitioner(settings.num_clients, settings.alpha)
    if settings.split == "pachinko" and found.superclasses is not None:
        return ls.PachinkoPartitioner(settings.num_clients, found.superclasses, settings.alpha, BETA)
    if settings.split == "natural" and found.owners is not None:
        return ls.NaturalPartitioner(found.owners[chosen])
    raise MissingDataError(f"{settings.data} cannot be dealt by the split {settings.split!r} yet")
