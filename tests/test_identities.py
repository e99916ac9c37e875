"""Federated runs that must equal something known.

Weights are float32 of order one: 1e-6 allows for a few roundings of a sum, 1e-5 for those of several rounds.
"""

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit, seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toy_models import LitNet, squared_error

import lightning_spectral as ls
from lightning_spectral.protocol.records import Download, WorkUnit


def recording(report: Callable[[float], object] = lambda loss: None, lr: float = 0.05, momentum: float = 0.0) -> LitNet:
    """Plain SGD on a small regression; reports the loss of every step it takes."""

    def loss(lit: Any, batch: Any) -> torch.Tensor:
        report(float((error := squared_error(lit, batch)).detach()))
        return error

    net = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return LitNet(net, lr, momentum, loss=loss)


@pytest.fixture
def regression() -> TensorDataset:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, 0] * x[:, 1])


def weights(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_one_client_without_sharding_is_plain_training(regression, quiet, fit):
    ours: list[float] = []
    theirs: list[float] = []
    federated, plain = recording(ours.append, momentum=0.9), recording(theirs.append, momentum=0.9)
    data = ls.FederatedDataModule(regression, ls.IIDPartitioner(num_clients=1), batch_size=8)
    fit(federated, data, clients_per_round=1)
    batches = [batch for batch, _ in data.client_data(Download(WorkUnit(0), 1.0, {})).epoch(0)]
    pl.Trainer(max_epochs=1, **quiet, log_every_n_steps=1).fit(
        plain, DataLoader(batches, batch_size=None, num_workers=0)
    )
    assert len(ours) == 5
    assert ours == theirs
    # the server lands on W - (W - W_new): W_new up to one rounding
    torch.testing.assert_close(weights(federated), weights(plain), rtol=1e-6, atol=1e-7)


def test_everyone_with_one_full_batch_step_is_gradient_descent(regression: TensorDataset, fit: Fit) -> None:
    federated, central = recording(), recording()
    data = ls.FederatedDataModule(regression, ls.IIDPartitioner(num_clients=6), batch_size=1000)
    fit(federated, data, clients_per_round=6, max_epochs=5)
    x, y = regression.tensors
    for _ in range(5):
        central.zero_grad()
        (central.net(x).squeeze(1) - y).square().mean().backward()
        with torch.no_grad():
            for parameter in central.parameters():
                assert parameter.grad is not None
                parameter -= 0.05 * parameter.grad
    torch.testing.assert_close(weights(federated), weights(central), rtol=1e-5, atol=1e-6)


def test_plain_server_is_the_weighted_mean_of_clients(regression: TensorDataset, fit: Fit) -> None:
    data = ls.FederatedDataModule(regression, ls.NaturalPartitioner([0] * 25 + [1] * 10 + [2] * 5), batch_size=5)
    federated = recording(momentum=0.9)  # fresh for every client
    start = copy.deepcopy(federated)
    fit(federated, data, clients_per_round=3, local_epochs=2)
    expected = torch.zeros_like(weights(start)).double()
    for client_id in range(3):
        client = copy.deepcopy(start)
        optimizer = client.configure_optimizers()
        for local_epoch in range(2):
            for batch, _ in data.client_data(Download(WorkUnit(client_id), 1.0, {})).epoch(local_epoch):
                optimizer.zero_grad()
                client.training_step(batch, 0).backward()
                optimizer.step()
        expected += weights(client).double() * len(data.partition[client_id]) / 40
    torch.testing.assert_close(weights(federated).double(), expected, rtol=1e-6, atol=1e-7)


def test_server_momentum_is_fedavgm(regression: TensorDataset, fit: Fit) -> None:
    """With everyone in every round: v <- 0.5 v + (w - mean of clients), w <- w - v, written out."""
    federated = recording()
    data = ls.FederatedDataModule(regression, ls.IIDPartitioner(num_clients=2), batch_size=1000)
    server_optimizer = lambda parameters: torch.optim.SGD(parameters, lr=1.0, momentum=0.5)  # noqa: E731
    fit(federated, data, clients_per_round=2, max_epochs=3, server_optimizer=server_optimizer)

    oracle = recording()
    velocity = torch.zeros_like(weights(oracle))
    for _ in range(3):
        clients = []
        for indices in data.partition:
            client = copy.deepcopy(oracle)
            client.training_step([t[indices] for t in regression.tensors], 0).backward()
            client.configure_optimizers().step()
            clients.append(weights(client))
        velocity = 0.5 * velocity + weights(oracle) - torch.stack(clients).mean(0)
        nn.utils.vector_to_parameters(weights(oracle) - velocity, oracle.parameters())
    torch.testing.assert_close(weights(federated), weights(oracle), rtol=1e-5, atol=1e-6)
