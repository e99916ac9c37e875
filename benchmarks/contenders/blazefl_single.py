"""BlazeFL's rounds in its single-threaded mode: ``FedAvgBaseClientTrainer`` and ``FedAvgBaseServerHandler``."""

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported, which torch does; BlazeFL shows a bar in each round

import torch
from blazefl.contrib import (
    FedAvgBaseClientTrainer,
    FedAvgBaseServerHandler,
    FedAvgPartitionedDataset,
    FedAvgPartitionType,
    FedAvgUplinkPackage,
)
from blazefl.core import ModelSelector
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, main, make_model, tensors


class Models(ModelSelector):
    def select_model(self, model_name: str) -> nn.Module:
        return make_model(model_name)


class Clients(FedAvgPartitionedDataset):
    def __init__(self) -> None:
        x, y = tensors()
        pairs = zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)
        self.datasets = [TensorDataset(*pair) for pair in pairs]

    def get_dataset(self, type_: FedAvgPartitionType, cid: int | None) -> TensorDataset:
        return self.datasets[cid]

    def get_dataloader(
        self, type_: FedAvgPartitionType, cid: int | None, batch_size: int | None, generator: torch.Generator | None
    ) -> DataLoader:
        return DataLoader(self.get_dataset(type_, cid), batch_size=batch_size, shuffle=True, generator=generator)


class Trainer(FedAvgBaseClientTrainer):
    def train(self, *args: Any, **kwargs: Any) -> FedAvgUplinkPackage:
        """Train as BlazeFL does, but start with fresh momentum."""
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.lr, momentum=MOMENTUM)
        return super().train(*args, **kwargs)


def run(model: str, rounds: int) -> Iterable[float]:
    common: dict[str, Any] = {
        "model_selector": Models(),
        "model_name": model,
        "dataset": Clients(),
        "num_clients": NUM_CLIENTS,
        "device": "cpu",
        "batch_size": BATCH_SIZE,
        "seed": 0,
    }
    server = FedAvgBaseServerHandler(**common, global_round=rounds, sample_ratio=COHORT / NUM_CLIENTS)
    trainer = Trainer(**common, epochs=1, lr=LR)
    return rounds_of(server, trainer)


def rounds_of(server: FedAvgBaseServerHandler, trainer: Trainer) -> Iterator[float]:
    """Run the loop that BlazeFL leaves to its users."""
    while not server.if_stop():
        start = time.perf_counter()
        sampled = server.sample_clients()
        trainer.local_process(server.downlink_package(), sampled)
        for package in trainer.uplink_package():
            server.load(package)
        yield time.perf_counter() - start


if __name__ == "__main__":
    main(run, ["blazefl"])
