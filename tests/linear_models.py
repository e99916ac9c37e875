"""Linear models whose updates can be written down, and federations of one or two of them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from federation import seeded
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from toy_models import LitNet, squared_error

import lightning_spectral as ls
from lightning_spectral.participation import Sampler

NUM_CLIENTS = 12
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)
SPECTRAL = ls.SpectralSharding(keep_ratio={0.3: 0.5, 0.6: 0.5}, layers=EVERY_LAYER)
ALGORITHMS = {"dense": ls.FedAvg(), "spectral": SPECTRAL, "bits": ls.Zampling(4, degree=3)}
SIZES = {"words": (4, 9, 0, 2, 5), "images": (3, 0, 8, 6, 1)}
WIDTHS = {"words": 3, "images": 4}


class LitLine(LitNet):
    """One linear layer, one plain step on all of a client's data: its update can be written down."""

    def __init__(self, width: int = 3, lr: float = 0.1) -> None:
        super().__init__(nn.Linear(width, 1), lr, loss=squared_error)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))


def lines(width: int, sizes: Sequence[int], seed: int = 0, **options: Any) -> ls.FederatedDataModule:
    """Regression data of clients of given sizes; a client may have none."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), width, generator=generator)
    data = TensorDataset(x, x @ torch.randn(width, generator=generator))
    owners = [client for client, size in enumerate(sizes) for _ in range(size)]
    partitioner = ls.NaturalPartitioner(owners, names=range(len(sizes)))
    return ls.FederatedDataModule(data, partitioner, val=data, batch_size=1000, **options)


def one_model(toy: TensorDataset) -> ls.MultiModelDataModule:
    partitioner = ls.DirichletPartitioner(num_clients=NUM_CLIENTS, alpha=10.0)
    return ls.MultiModelDataModule({"words": ls.FederatedDataModule(toy, partitioner, val=toy, batch_size=4)})


def update(module: LitLine, data: ls.FederatedDataModule, client: int) -> Tensor:
    """The change that one client makes in one plain step on all of its data."""
    local = copy.deepcopy(module)
    tensors: Any = data.train
    local.training_step([tensor[data.partition[client]] for tensor in tensors.tensors], 0).backward()
    local.configure_optimizers().step()
    return (vector(local) - vector(module)).double()


def vector(module: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def two(**options: Any) -> Mapping[str, ls.FederatedModule]:
    return {"words": ls.FederatedModule(LitLine(), **options), "images": ls.FederatedModule(LitLine())}


def two_lines(participation: Sampler, **options: Any) -> tuple[ls.MultiModelModule, ls.MultiModelDataModule]:
    modules = {name: ls.FederatedModule(seeded(LitLine, width)) for name, width in WIDTHS.items()}
    data = {name: lines(WIDTHS[name], SIZES[name], seed=index) for index, name in enumerate(WIDTHS)}
    processors = options.pop("processors", [1, 2, 1, 2, 1])
    model = ls.MultiModelModule(modules, participation=participation, processors=processors, **options)
    return model, ls.MultiModelDataModule(data)
