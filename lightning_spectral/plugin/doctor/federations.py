"""One tiny federation for each algorithm, always with the same initial weights and the same data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_spectral.algorithms import (
    FIARSE,
    Algorithm,
    FedAvg,
    LoRA,
    Scaffold,
    SpectralSharding,
    StaleUpdates,
    WidthSharding,
    Zampling,
)
from lightning_spectral.participation import Uniform
from lightning_spectral.partition import IIDPartitioner
from lightning_spectral.plugin.data.data_module import FederatedDataModule
from lightning_spectral.plugin.data.multi_model import MultiModelDataModule
from lightning_spectral.plugin.module import FederatedModule
from lightning_spectral.plugin.multi_model import MultiModelModule
from lightning_spectral.protocol.rng import derived_generator, isolated_rng

NUM_CLIENTS, CLIENTS_PER_ROUND, NUM_CLASSES, SIZE = 6, 3, 4, 8

ModuleAndData = tuple[FederatedModule | MultiModelModule, FederatedDataModule | MultiModelDataModule]


class LitNet(pl.LightningModule):
    """Classifies images with convolutions, batch normalisation and linear layers, by SGD with a momentum."""

    example_input_array = torch.zeros(2, 1, SIZE, SIZE)

    def __init__(self, momentum: float = 0.9) -> None:
        super().__init__()
        self.momentum = momentum
        with isolated_rng(0):
            self.net = nn.Sequential(
                *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()),
                *(nn.Linear(8 * (SIZE // 2) ** 2, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)),
            )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, labels = batch
        return nn.functional.cross_entropy(self(x), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


def _one_model(algorithm: Algorithm, momentum: float = 0.9) -> Callable[[], ModuleAndData]:
    def make() -> ModuleAndData:
        module = FederatedModule(LitNet(momentum), algorithm=algorithm, clients_per_round=CLIENTS_PER_ROUND)
        return module, _data()

    return make


def _two_models() -> ModuleAndData:
    algorithms: dict[str, Algorithm] = {"dense": FedAvg(), "spectral": SpectralSharding()}
    models = {name: FederatedModule(LitNet(), algorithm=algorithm) for name, algorithm in algorithms.items()}
    data = MultiModelDataModule({name: _data() for name in models})
    return MultiModelModule(models, participation=Uniform(active=CLIENTS_PER_ROUND)), data


FEDERATIONS: Mapping[str, Callable[[], ModuleAndData]] = MappingProxyType(
    {
        "FedAvg": _one_model(FedAvg()),
        "SpectralSharding": _one_model(SpectralSharding()),
        "  .published": _one_model(SpectralSharding.published()),
        "Zampling": _one_model(Zampling(compression=4, degree=4)),
        "WidthSharding": _one_model(WidthSharding()),
        "FIARSE": _one_model(FIARSE()),
        "LoRA": _one_model(LoRA(2)),
        "Scaffold": _one_model(Scaffold(), momentum=0.0),
        "StaleUpdates": _one_model(StaleUpdates()),
        "two models": _two_models,
    }
)


def _data() -> FederatedDataModule:
    x = torch.randn(8 * NUM_CLIENTS, 1, SIZE, SIZE, generator=derived_generator(0, "images of the self-check"))
    labels = x.mean((2, 3)).squeeze(1).argsort().argsort() % NUM_CLASSES
    return FederatedDataModule(TensorDataset(x, labels), IIDPartitioner(NUM_CLIENTS), batch_size=4)
