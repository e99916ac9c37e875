"""Flower's rounds: a ``ServerApp`` and a ``ClientApp`` in its simulation, with one Ray worker for clients.

The seconds are from one ``configure_train`` to the next, so they exclude the start of Ray and of its worker.
"""

import functools
import logging
import os
import tempfile
import time
from collections.abc import Iterable
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workload import BATCH_SIZE, COHORT, EXAMPLES, LR, MOMENTUM, NUM_CLIENTS, main, make_model, tensors

client_app = ClientApp()
cached_model = functools.cache(make_model)


@functools.cache
def loaders() -> list[DataLoader]:
    x, y = tensors()
    pairs = zip(x.split(EXAMPLES), y.split(EXAMPLES), strict=True)
    return [DataLoader(TensorDataset(*pair), batch_size=BATCH_SIZE, shuffle=True) for pair in pairs]


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    net = cached_model(message.content["config"]["model"])
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    for x, y in loaders()[context.node_config["partition-id"]]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": EXAMPLES})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class ClockedFedAvg(FedAvg):
    def __init__(self) -> None:
        super().__init__(fraction_train=COHORT / NUM_CLIENTS, fraction_evaluate=0.0)
        self.ticks: list[float] = []

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        self.ticks.append(time.perf_counter())
        return super().configure_train(*args, **kwargs)


def run(model: str, rounds: int) -> Iterable[float]:
    logging.disable(logging.WARNING)
    strategy, server_app = ClockedFedAvg(), ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        weights = ArrayRecord(make_model(model).state_dict())
        strategy.start(grid, weights, num_rounds=rounds + 1, train_config=ConfigRecord({"model": model}))

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["FLWR_HOME"] = folder
        start = {"num_cpus": 1, "_temp_dir": folder, "logging_level": "ERROR", "log_to_driver": False}
        backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": start}
        run_simulation(server_app, client_app, NUM_CLIENTS, backend_config=backend)
    return [end - start for start, end in zip(strategy.ticks, strategy.ticks[1:], strict=False)]


if __name__ == "__main__":
    import flower_simulation  # by its module name, so that the worker finds the same functions and keeps their caches

    main(flower_simulation.run, ["flwr", "ray"])
