"""What the table says of spectral sharding is what rounds send, whatever a plan decides."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import Fit
from one_client import client_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lightning_spectral as ls

KEEP_RATIOS = (0.1, 0.3, 0.5, 0.8, 1.0)


class Federated(pl.LightningModule):
    """Batch statistics, a mask, a frozen layer, a tied head and one layer of doubles."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6)
        self.net = nn.Sequential(
            *(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 12))
        )
        self.net[4].requires_grad_(False)
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.net(x)).relu())) + self.offset

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def ledger_of(
    fit: Fit, algorithm: Any, module: pl.LightningModule, toy: TensorDataset
) -> dict[float, tuple[float, float]]:
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4))
    return fit(module, data, algorithm=algorithm).ledger.bytes_per_client()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"buffers": {"offset": "server", "net.1.*": "server"}},
        {"term_granularity": 4},
        {"ratio_factors": {"net.2": 3.0}},
        {"exclude": ["net.2"]},
        {"split": {"net.5": 3}},
        {"output_ratio": 0.3},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Round 0. the running averages:lightning_spectral.SpectralWarning")  # meant to stay
def test_bytes_are_those_of_a_round(options: Any, toy: TensorDataset, fit: Fit) -> None:
    ratios, choices = (0.2, 0.55), ls.LayerChoices(**options)
    algorithm = ls.SpectralSharding(keep_ratio=dict.fromkeys(ratios, 0.5), layers=choices)
    table = ls.cost_table(Federated(), algorithm, ratios)
    sent = ledger_of(fit, algorithm, Federated(), toy)
    assert {r: (cost.downlink_bytes, cost.uplink_bytes) for r, cost in table.at.items()} == sent


def test_bytes_are_those_of_a_round_whose_plan_says_what_buffers_do(toy: TensorDataset, fit: Fit) -> None:
    plan = ls.nn.plan_layers(Federated(), choices=ls.LayerChoices(buffers={"offset": "server"}))
    algorithm = ls.SpectralSharding(keep_ratio=0.2, layers=plan)
    table = ls.cost_table(Federated(), algorithm, [0.2])
    assert table.at[0.2].uplink_bytes < ls.cost_table(Federated(), ls.SpectralSharding(), [0.2]).at[0.2].uplink_bytes
    assert table.full.uplink_bytes < ls.cost_table(Federated(), ls.SpectralSharding(), [0.2]).full.uplink_bytes
    sent = ledger_of(fit, algorithm, Federated(), toy)
    assert sent == {0.2: (table.at[0.2].downlink_bytes, table.at[0.2].uplink_bytes)}


def test_bytes_of_the_whole_model_are_those_of_federated_averaging(toy: TensorDataset, fit: Fit) -> None:
    full = ls.cost_table(Federated(), ls.FedAvg(), [1.0]).full
    assert ledger_of(fit, ls.FedAvg(), Federated(), toy) == {1.0: (full.downlink_bytes, full.uplink_bytes)}


@pytest.mark.parametrize("output_ratio", [0.3, 1.0])
def test_parameters_are_those_of_the_sub_model(output_ratio: float) -> None:
    choices = ls.LayerChoices(output_ratio=output_ratio)
    table = ls.cost_table(Federated(), ls.SpectralSharding(layers=choices), KEEP_RATIOS)
    assert table.full.parameters == sum(p.numel() for p in Federated().parameters())
    for keep_ratio, cost in table.at.items():
        side = ls.SpectralSharding(layers=choices).bind(Federated()).device_half
        client = client_of(side, Federated(), keep_ratio)
        assert cost.parameters == sum(p.numel() for p in client.parameters())
