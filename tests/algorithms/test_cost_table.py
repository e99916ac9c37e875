"""What the table says of any algorithm is what rounds send."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from federation import HARDLY_MOVED, Fit, same_state, seeded
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral import cost_table

EXAMPLE = torch.zeros(5, 6)
KEPT: list[Any] = [ls.SpectralSharding(), ls.WidthSharding(), ls.FIARSE()]
WHOLE: list[Any] = [ls.FedAvg(), ls.Scaffold(), ls.StaleUpdates()]
ADAPTED: list[Any] = [
    ls.LoRA(aggregation=aggregation, layers=["net.0", "net.2"], train=["net.5"]) for aggregation in AGGREGATIONS
]
COMPRESSED: list[Any] = [ls.Zampling(degree=2), ls.Zampling(degree=2, downlink_bits=5, coordinated=True)]
CASES = [
    *((a, [0.25, 0.75], replace(a, keep_ratio={0.25: 0.5, 0.75: 0.5})) for a in KEPT),
    *((a, [1.0], a) for a in WHOLE),
    *((a, [2, 4], replace(a, rank={2: 0.5, 4: 0.5})) for a in ADAPTED),
    *((a, [4], replace(a, compression=4)) for a in COMPRESSED),
]


class LitPlain(LitMLP):
    """With SGD as SCAFFOLD needs it, and an example to find channels with."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = EXAMPLE

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize(("algorithm", "capacities", "trained"), CASES, ids=lambda value: repr(value)[:70])
def test_bytes_are_those_of_the_ledger(algorithm: Any, capacities: Any, trained: Any, data: Any, fit: Fit) -> None:
    """In the second round of a run, when what travels once has arrived."""
    table = cost_table(LitPlain(), algorithm, capacities, EXAMPLE)
    rows = fit(LitPlain(), data, algorithm=trained, clients_per_round=12, max_epochs=2).ledger.rows
    sent = {(row.keep_ratio, row.downlink_bytes) for row in rows if row.round_idx == 1}
    back: dict[float, int] = {}
    for row in rows:
        back[row.keep_ratio] = max(row.uplink_bytes, back.get(row.keep_ratio, 0))
    assert sorted(down for _, down in sent) == sorted(cost.downlink_bytes for cost in table.at.values())
    assert sorted(back.values()) == sorted(cost.uplink_bytes for cost in table.at.values())


@pytest.mark.parametrize(("algorithm", "capacities", "trained"), CASES, ids=lambda value: repr(value)[:70])
def test_counting_changes_nothing_and_the_whole_model_costs_the_same(
    algorithm: Any, capacities: Any, trained: Any
) -> None:
    module, state = seeded(LitPlain), torch.get_rng_state()
    table = cost_table(module, algorithm, capacities, EXAMPLE)
    assert same_state(module.state_dict(), seeded(LitPlain).state_dict())
    assert torch.equal(state, torch.get_rng_state())
    assert table.full == cost_table(module, ls.FedAvg(), [1], EXAMPLE).full


@pytest.mark.parametrize(("algorithm", "head"), [(ADAPTED[0], "rank"), (KEPT[1], "keep ratio")], ids=["LoRA", "width"])
def test_frozen_tensors_have_a_column(algorithm: Any, head: str) -> None:
    module = LitPlain()
    module.net[0].requires_grad_(head == "rank")
    module.net[5].bias.requires_grad_(False)
    header, full, last = str(cost_table(module, algorithm, [1], EXAMPLE)).splitlines()
    assert header.startswith(f"{head} ")
    assert header.endswith("down once")
    assert full.startswith("full ")
    assert last.startswith("1 ")


def test_a_whole_model_has_no_smaller_capacity() -> None:
    with pytest.raises(ValueError, match=r"`capacities` must be \[1\] with FedAvg.*; got \[0\.5\]"):
        cost_table(LitMLP(), ls.FedAvg(), [0.5], EXAMPLE)
