"""The tasks: six small networks on 50 clients, with images dealt to the clients in three ways."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.append(str(Path(__file__).parents[1]))  # code that the studies share
from images import fashion_mnist, mnist

import lightning_spectral as ls

NUM_TRAIN, NUM_VAL = 4_000, 400  # of 5,000 images; the second part is for choosing learning rates, the rest for testing
NUM_CLIENTS = 50  # 80 images each
CLIENTS_PER_ROUND = 10
LOCAL_EPOCHS = 2
BATCH_SIZE = 20
MOMENTUM = 0.9  # of local steps
IMAGES = {"MNIST": mnist, "Fashion": fashion_mnist}
ALPHAS = {"Dir(10 p)": 10.0, "Dir(1 p)": 1.0, "Dir(0.3 p)": 0.3}
TIED = "4 and 6 labels"  # the first half of the clients hold four of the labels, and the others the rest
FEW = 4


def plain(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Four convolutions of 16 to 64 channels without shortcuts: nothing can bypass a layer that is mostly missing."""
    layers: list[nn.Module] = []
    for c_in, c_out, stride in [(1, 16, 2), (16, 32, 1), (32, 32, 2), (32, 64, 1)]:
        layers += [nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False), norm(c_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut."""

    def __init__(self, channels: int, zero: bool) -> None:
        super().__init__()
        last_norm = nn.GroupNorm(4, channels)
        if zero:
            nn.init.zeros_(last_norm.weight)  # the block starts as the identity
        convs = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)]
        self.layers = nn.Sequential(convs[0], nn.GroupNorm(4, channels), nn.ReLU(), convs[1], last_norm)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.layers(x))


def residual(zero: bool) -> nn.Module:
    """Two residual blocks of 32 channels, which start as the identity if ``zero``."""
    stem = nn.Sequential(nn.Conv2d(1, 32, 3, stride=2, padding=1, bias=False), nn.GroupNorm(4, 32), nn.ReLU())
    blocks = nn.Sequential(ResidualBlock(32, zero), ResidualBlock(32, zero))
    return nn.Sequential(stem, blocks, nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32 * 3 * 3, 10))


class Transformer(nn.Module):
    """Two pre-norm encoder blocks of width 48 over sixteen patches."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4, padding=1)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).mT + self.positions
        return self.head(self.norm(self.blocks(tokens).mean(1)))


def mlp() -> nn.Module:
    """Three hidden layers of 200 units."""
    sizes = [14 * 14, 200, 200, 200]
    hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(200, 10))


NETS: dict[str, Callable[[], nn.Module]] = {
    "plain, GroupNorm": lambda: plain(lambda channels: nn.GroupNorm(4, channels)),
    "plain, BatchNorm": lambda: plain(nn.BatchNorm2d),
    "MLP": mlp,
    "residual": lambda: residual(zero=False),
    "residual, zero init": lambda: residual(zero=True),
    "transformer": Transformer,
}
ADAMW = ("transformer",)  # networks that are trained with AdamW; the others with SGD


class Classifier(pl.LightningModule):
    """An ordinary LightningModule around one of the networks, by name."""

    def __init__(self, net: str, lr: float, num_rounds: int) -> None:
        super().__init__()
        self.net, self.lr, self.num_rounds, self.first_round = NETS[net](), lr, num_rounds, 0
        self.adaptive = net in ADAMW

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        images, labels, is_test = batch
        right = (self(images).argmax(1) == labels).float()
        for name, part in {"val": ~is_test, "test": is_test}.items():
            self.log(name, right[part].mean(), batch_size=int(part.sum()))

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[torch.optim.lr_scheduler.LRScheduler]]:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=MOMENTUM)
        if self.adaptive:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, self.cosine)]

    def cosine(self, round_of_fit: int) -> float:
        """Return the learning rate as a share of the first one; it falls to zero over all rounds of the run."""
        return (1 + math.cos(math.pi * (self.first_round + round_of_fit) / self.num_rounds)) / 2


def divided(data: str, seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the clients' images, and the others with a third column that marks those for testing."""
    images, labels = IMAGES[data]()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    train, others = order[:NUM_TRAIN], order[NUM_TRAIN:]
    is_test = torch.arange(len(others)) >= NUM_VAL
    return TensorDataset(images[train], labels[train]), TensorDataset(images[others], labels[others], is_test)


def deal(data: str, split: str, seed: int) -> ls.FederatedDataModule:
    """Deal the images to the clients; the others are one batch."""
    train, others = divided(data, seed)
    if split == TIED:
        return federated(train, by_halves(train.tensors[1], NUM_CLIENTS), others, seed)
    return federated(train, ls.DirichletPartitioner(num_clients=NUM_CLIENTS, alpha=ALPHAS[split]), others, seed)


def by_halves(labels: Tensor, num_clients: int) -> ls.NaturalPartitioner:
    """Deal the first labels evenly to the first half of the clients, and the others to the second half."""
    half, few = num_clients // 2, labels < FEW
    clients = torch.empty_like(labels)
    clients[few] = torch.arange(int(few.sum())) % half
    clients[~few] = half + torch.arange(int((~few).sum())) % (num_clients - half)
    return ls.NaturalPartitioner(clients, names=range(num_clients))


def second_half(data: ls.FederatedDataModule, seed: int) -> ls.FederatedDataModule:
    """Return the data without the first half of the clients."""
    data.setup("fit")
    left = [*data.partition][NUM_CLIENTS // 2 :]
    owners = torch.arange(len(left)).repeat_interleave(torch.tensor([len(one) for one in left]))
    images, labels = (tensor[torch.cat(left)] for tensor in data.train.tensors)
    return federated(TensorDataset(images, labels), ls.NaturalPartitioner(owners), data.val, seed)


def federated(train: TensorDataset, dealt: ls.Partitioner, others: TensorDataset, seed: int) -> ls.FederatedDataModule:
    """Return the data of the clients, and the others as one batch."""
    size = len(others)
    return ls.FederatedDataModule(train, dealt, val=others, batch_size=BATCH_SIZE, eval_batch_size=size, seed=seed)
