"""What the table says of Zampling is what a round sends, what a client holds and what torch counts."""

import math
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from federation import HARDLY_MOVED, Fit
from lightning.pytorch.loggers import CSVLogger
from one_client import client_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lightning_spectral as ls
from lightning_spectral.algorithms.costs import NEEDS
from lightning_spectral.nn.zampling import Compression, Compressions

EXAMPLE = torch.zeros(5, 6)
pytestmark = pytest.mark.filterwarnings(HARDLY_MOVED)


class Federated(pl.LightningModule):
    """Batch statistics, a mask, a frozen layer, a tied one and a scale of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12))
        self.net[4].requires_grad_(False)
        self.one, self.two, self.head = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.two.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(3, 1))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(self.net(x)).relu())) * self.scale[:, 0] + self.offset

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"downlink_bits": 5},
    {"buffers": {"offset": "server", "net.1.*": "server"}},
    {"exclude": ["head.*", "*.bias"]},
    {"degree": 3},
]


def bytes_of(row: Any) -> tuple[int, int, int]:
    """What travels down and up each time, and down once, in a client's first turn."""
    return row.downlink_bytes - row.frozen_bytes, row.uplink_bytes, row.frozen_bytes


def algorithm_of(compression: float, options: dict[str, Any]) -> ls.Zampling:
    return ls.Zampling(compression, **{"degree": 10, **options})


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("compression", [1, 3.7, 20])
@pytest.mark.filterwarnings("ignore:Round 0. the running averages:lightning_spectral.SpectralWarning")  # meant to stay
def test_bytes_are_those_of_a_round(compression: float, options: Any, toy: TensorDataset, fit: Fit) -> None:
    cost = ls.cost_table(Federated(), algorithm_of(1, options), [compression], EXAMPLE).at[compression]
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4))
    sent = fit(Federated(), data, algorithm=algorithm_of(compression, options)).ledger.rows
    assert {bytes_of(row) for row in sent} == {(cost.downlink_bytes, cost.uplink_bytes, cost.frozen_bytes)}


def test_bytes_of_a_mask_for_each_weight_are_those_of_a_round(toy: TensorDataset, fit: Fit) -> None:
    cost = ls.cost_table(Federated(), ls.Zampling.supermask(), [1], EXAMPLE).at[1]
    data = ls.FederatedDataModule(toy, ls.IIDPartitioner(num_clients=4))
    row = fit(Federated(), data, algorithm=ls.Zampling.supermask()).ledger.rows[0]
    assert bytes_of(row) == (cost.downlink_bytes, cost.uplink_bytes, cost.frozen_bytes)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_and_work_are_those_of_a_clients_model(options: Any) -> None:
    cost = ls.cost_table(Federated(), algorithm_of(1, options), [4], EXAMPLE).at[4]
    algorithm, server = algorithm_of(4, options), Federated()
    half = algorithm.bind(server, algorithm.new_state(server, 0))
    client = client_of(half.device_half, server, 1.0)
    client._zampling.draw(torch.Generator().manual_seed(0))
    assert cost.parameters == sum(p.numel() for p in client.parameters())
    with FlopCounterMode(display=False) as counter:
        client(EXAMPLE)
    assert 2 * cost.macs == counter.get_total_flops()
    matrix = client._zampling.matrix
    assert cost.step_macs == 2 * matrix.entries()[1].numel()
    assert cost.held_bytes == matrix._kept.data.nbytes + matrix._kept.indices.nbytes


def test_the_table_reads_as_rows_of_compressions(tmp_path: Any) -> None:
    table = ls.cost_table(Federated(), ls.Zampling(), [2, 30], EXAMPLE)
    header, full, _, last = str(table).splitlines()
    assert header.split("  ")[0] == "compression"
    assert full.startswith("full ")
    assert f" {table.at[30].uplink_bytes} B ({table.at[30].uplink_bytes / table.full.uplink_bytes:.0%})" in last
    assert list(table.as_dict()) == ["full", "2", "30"]
    table.log(logger := CSVLogger(tmp_path))
    assert logger.experiment.metrics[0]["cost/30/step_macs"] == table.at[30].step_macs


def test_a_share_below_one_percent_is_not_shown_as_none() -> None:
    table = ls.cost_table(nn.Linear(100, 100), ls.Zampling(), [500], torch.zeros(1, 100))
    assert "3 B (0.007%)" in str(table)


def test_what_zampling_refuses_has_no_cost() -> None:
    with pytest.raises(ValueError, match=r"`capacities` must be at least 1 and finite, got 0\.5"):
        ls.cost_table(Federated(), ls.Zampling(), [0.5], EXAMPLE)
    with pytest.raises(ValueError, match="`degree` must be between 1 and the number of columns, 5, got 10"):
        ls.cost_table(Federated(), ls.Zampling(), [100], EXAMPLE)
    with pytest.raises(ValueError, match="has no trainable weight"):
        ls.cost_table(nn.BatchNorm1d(3), ls.Zampling(), [8], torch.zeros(2, 3))


@pytest.mark.parametrize("budgeted", sorted(NEEDS.keys() - {"budget_macs", "memory"}))  # the former is always the same
@pytest.mark.parametrize("downlink_bits", [None, 3])
def test_the_answer_fits_and_no_smaller_compression_does(budgeted: str, downlink_bits: int | None) -> None:
    """Every number of probabilities is tried, and budgets just below, at and above what each takes."""
    module, degree = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), 2
    how = Compression(1, degree)
    weights = how.weights_of(module)
    num_weights = sum(weight.num_values for weight in weights)
    algorithm = ls.Zampling(degree=degree, downlink_bits=downlink_bits)
    factors = dict(zip(range(degree, num_weights + 1), Compressions(num_weights, degree), strict=True))
    table = ls.cost_table(module, algorithm, list(factors.values()), torch.zeros(2, 4))
    needed = {n: getattr(table.at[factor], NEEDS[budgeted]) for n, factor in factors.items()}
    assert [cost.parameters - 6 for cost in table.at.values()] == list(factors)
    for budget in sorted({value + change for value in needed.values() for change in (-1, 0, 1)})[1:]:
        compression: Any = ls.largest_that_fits(module, algorithm, torch.zeros(2, 4), **{budgeted: budget})
        assert Compression(compression, degree).num_probs(weights) == max(n for n in needed if needed[n] <= budget)


def test_a_compression_gives_the_number_of_probabilities_that_it_is_made_for() -> None:
    for num_weights in (7, 267_082, 11_173_962):
        for num_probs in {min(num_weights, n) for n in (1, 3, 7, 1001, 33_333, 266_610)}:
            assert math.ceil(num_weights / Compressions(num_weights, 1)[num_probs - 1]) == num_probs
            below = math.nextafter(Compressions(num_weights, 1)[num_probs - 1], 0.0)
            assert below < 1.0 or math.ceil(num_weights / below) > num_probs


def test_if_nothing_fits_the_smallest_cost_is_named() -> None:
    module = nn.Sequential(nn.Linear(6, 28), nn.BatchNorm1d(28, affine=False))
    smallest = 2 + 4 * 2 * 28  # ten bits, and two vectors of statistics
    with pytest.raises(ValueError, match=rf"No compression fits `budget_uplink_bytes=20`: .* takes {smallest}"):
        ls.largest_that_fits(module, ls.Zampling(), budget_uplink_bytes=20)
    assert ls.largest_that_fits(module, ls.Zampling(), budget_uplink_bytes=smallest) == (6 * 28 + 28) / 16


def test_a_budget_for_each_client_is_refused() -> None:
    with pytest.raises(TypeError, match="`budget_bytes` must be one number, since all clients share one compression"):
        ls.largest_that_fits(nn.Linear(6, 6), ls.Zampling(), budget_bytes=[100, 200])


def test_activations_are_kept_where_every_weight_is_drawn() -> None:
    """Nothing but the drawn weights needs a gradient: the first output and the weight behind it are kept."""
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 3, bias=False))
    cost = ls.cost_table(net, ls.Zampling(degree=2), [2], torch.zeros(5, 8)).at[2]
    assert cost.kept_values == 5 * 16 + (8 * 16 + 16 * 3)  # weights are views of one vector
