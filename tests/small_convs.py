"""Small convolutional networks whose convolutions clients may hold as factors, images for them, and single layers."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

CONV: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 3, "stride": 2, "padding": 1, "bias": False},
    {"kernel_size": 3, "dilation": 2, "padding": 2},
    {"kernel_size": 3, "padding": 1, "padding_mode": "circular"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 2, "padding": "same", "padding_mode": "replicate"},
    {"kernel_size": 5, "padding": "same"},
    {"kernel_size": 3, "padding": "valid", "padding_mode": "circular"},
]


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


class LitConvs(pl.LightningModule):
    """Two convolutions that are held as factors, and a 1 x 1 one and a linear layer that are held as terms."""

    example_input_array = torch.zeros(2, 2, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        convs = [nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        more = [nn.Conv2d(8, 8, 1), nn.Conv2d(8, 6, 2), nn.Flatten(), nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 3)]
        self.net = nn.Sequential(*convs, *more)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LitOnlyConvs(LitConvs):
    """Nothing is held as terms."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Flatten(), nn.Linear(32, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def images_of() -> ls.FederatedDataModule:
    """Six clients with twelve examples each."""
    x = torch.randn(72, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    examples = TensorDataset(x, x.mean((2, 3)).argmax(1))
    return ls.FederatedDataModule(examples, ls.IIDPartitioner(6), val=examples, batch_size=6)
