"""What the table says of sub-models is what rounds send, what a client holds and what torch counts."""

from typing import Any

import pytest
import torch
from federation import Fit
from one_client import client_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toy_models import LitMLP, LitSmall

import lightning_spectral as ls
from lightning_spectral.algorithms.costs import NEEDS

EXAMPLE, RATIOS = torch.zeros(5, 6), (0.1, 0.3, 0.75, 1.0)


class LitFrozen(LitSmall):
    """A bias that travels once, and a frozen layer that is cut or chosen from."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].requires_grad_(False)
        self.net[6].bias.requires_grad_(False)


def algorithms(keep_ratio: Any = 0.25) -> list[Any]:
    return [
        ls.WidthSharding(ls.RollingChannels(), keep_ratio, buffers={"*.running_var": "server"}),
        ls.WidthSharding(keep_ratio=keep_ratio, exclude=["net.0"]),
        ls.FIARSE(keep_ratio),
        ls.FIARSE(keep_ratio, exclude=["net.0.*"], buffers={"*.running_*": "server"}),
    ]


@pytest.mark.filterwarnings("ignore:Round 0. the running averages of:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("place", range(4))
def test_bytes_are_those_of_a_round(place: int, data: Any, fit: Fit) -> None:
    table = ls.cost_table(LitFrozen(), algorithms()[place], RATIOS, EXAMPLE)
    algorithm = algorithms({keep_ratio: 0.25 for keep_ratio in RATIOS})[place]
    rows = fit(LitFrozen(), data, algorithm=algorithm, clients_per_round=12, max_epochs=2).ledger.rows
    assert {row.keep_ratio for row in rows} == set(RATIOS)
    for row in rows:
        cost = table.at[row.keep_ratio]
        assert (row.downlink_bytes - row.frozen_bytes, row.uplink_bytes) == (cost.downlink_bytes, cost.uplink_bytes)
        assert row.frozen_bytes == (0 if row.round_idx else cost.frozen_bytes)


@pytest.mark.parametrize("algorithm", algorithms(), ids=repr)
def test_parameters_and_work_are_those_of_a_clients_model(algorithm: Any) -> None:
    table, server = ls.cost_table(LitFrozen(), algorithm, RATIOS, EXAMPLE), LitFrozen()
    for keep_ratio, cost in table.at.items():
        client = client_of(algorithm.bind(server).device_half, server, keep_ratio)
        assert cost.parameters == sum(p.numel() for p in client.parameters())
        with FlopCounterMode(display=False) as counter:
            client(EXAMPLE)
        assert 2 * cost.macs == counter.get_total_flops()


def test_width_saves_all_and_large_weights_save_traffic_alone() -> None:
    """Numbers by hand, for an MLP of widths 6, 12, 12, 3."""
    width, largest = (
        ls.cost_table(LitMLP(dropout=0.0), algorithm, [0.25], EXAMPLE)
        for algorithm in (ls.WidthSharding(), ls.FIARSE())
    )
    small, n = width.at[0.25], 3
    assert small.parameters == (6 + 1) * n + (n + 1) * n + (n + 1) * 3
    assert (small.macs, small.kept_values) == (5 * (6 * n + n * n + n * 3), 5 * 2 * n)
    whole, chosen, num_weights = largest.full, largest.at[0.25], 6 * 12 + 12 * 12 + 12 * 3
    assert (chosen.parameters, chosen.macs, chosen.kept_bytes) == (whole.parameters, whole.macs, whole.kept_bytes)
    assert chosen.uplink_bytes == 4 * (num_weights // 4 + 12 + 12 + 3)
    assert chosen.downlink_bytes == chosen.uplink_bytes + (72 + 7) // 8 + 144 // 8 + (36 + 7) // 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


@pytest.mark.parametrize("budgeted", sorted(NEEDS.keys() - {"memory"}))
@pytest.mark.parametrize(
    ("algorithm", "ratios"),
    [(ls.WidthSharding(), [1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1.0]), (ls.FIARSE(), [n / 30 for n in range(1, 31)])],
    ids=["width", "FIARSE"],
)
def test_the_answer_fits_and_no_larger_ratio_does(algorithm: Any, ratios: list[float], budgeted: str) -> None:
    """Every keep ratio is tried, and budgets just below, at and above what each takes."""
    example = torch.zeros(5, 3)
    table = ls.cost_table(net(), algorithm, ratios, example)
    needed = {keep_ratio: getattr(cost, NEEDS[budgeted]) for keep_ratio, cost in table.at.items()}
    budgets = sorted({need + change for need in needed.values() for change in (-1, 0, 1)})[1:]
    expected = [max(keep_ratio for keep_ratio in ratios if needed[keep_ratio] <= budget) for budget in budgets]
    found = ls.largest_that_fits(net(), algorithm, example, **{budgeted: budgets})
    assert found == expected
    assert ls.largest_that_fits(net(), algorithm, example, **{budgeted: budgets[0]}) == expected[0]
    with pytest.raises(ValueError, match=rf"No keep ratio fits `{budgeted}={budgets[0] - 1}`: .* {budgets[0]}\. Raise"):
        ls.largest_that_fits(net(), algorithm, example, **{budgeted: budgets[0] - 1})


def test_what_has_no_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`capacities` must be in \(0, 1\], got 1\.5"):
        ls.cost_table(net(), ls.FIARSE(), [1.5], EXAMPLE)
    with pytest.raises(ValueError, match="set its `example_input_array`"):
        ls.largest_that_fits(net(), ls.WidthSharding(), budget_bytes=100)
    assert ls.largest_that_fits(net(), ls.FIARSE(), budget_bytes=1e6) == 1.0
