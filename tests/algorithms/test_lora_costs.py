"""What the table says of LoRA is what rounds send, what a client holds and what torch counts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from aggregations import AGGREGATIONS
from federation import Fit
from one_client import client_of
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from toy_models import LitMLP

import lightning_spectral as ls
from lightning_spectral.algorithms.costs import NEEDS

EXAMPLE = torch.zeros(5, 6)
OPTIONS: dict[str, Any] = {"layers": ["net.0", "net.2"], "train": ["net.5"]}


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
def test_bytes_are_those_of_rounds(aggregation: Any, data: Any, fit: Fit) -> None:
    """The costlier of two rounds, down and up, and what the first round sends in addition."""
    for ranks in ([2, 4], [3]):
        table = ls.cost_table(LitMLP(), ls.LoRA(aggregation=aggregation, **OPTIONS), ranks, EXAMPLE)
        algorithm = ls.LoRA({rank: 1 / len(ranks) for rank in ranks}, aggregation=aggregation, **OPTIONS)
        rows = fit(LitMLP(), data, algorithm=algorithm, clients_per_round=12, max_epochs=3).ledger.rows
        for rank, cost in table.at.items():
            own = [row for row in rows if round(row.keep_ratio * max(ranks)) == rank]
            down = {row.round_idx: row.downlink_bytes for row in own}
            assert (cost.downlink_bytes, cost.uplink_bytes) == (down[1], max(row.uplink_bytes for row in own))
            assert down == {0: down[1] + cost.frozen_bytes, 1: down[1], 2: down[1]}


@pytest.mark.parametrize("sizes", [(6, 48), (48, 6)])
def test_of_factors_that_take_turns_the_larger_one_counts(sizes: tuple[int, int]) -> None:
    example, alternating = torch.zeros(1, sizes[0]), ls.AlternatingFactors()
    table = ls.cost_table(nn.Sequential(nn.Linear(*sizes)), ls.LoRA(aggregation=alternating), [2], example)
    assert table.at[2].uplink_bytes == 4 * 2 * 48


def test_folding_costs_downloads_alone() -> None:
    sampled, folded = (
        ls.cost_table(LitMLP(), ls.LoRA(aggregation=aggregation, **OPTIONS), [2, 4], EXAMPLE).at
        for aggregation in (ls.SampledTerms(), ls.algorithms.FoldedTerms())
    )
    multipliers = 4 * 2  # bytes of each term
    for rank in (2, 4):
        more = 4 * (4 - rank) * (6 + 12 + 12 + 12) - rank * multipliers
        assert folded[rank] == replace(
            sampled[rank],
            downlink_bytes=sampled[rank].downlink_bytes + more,
            kept_bytes=folded[rank].kept_bytes,
            kept_values=folded[rank].kept_values,
        )
        assert folded[rank].kept_bytes <= sampled[rank].kept_bytes


def test_parameters_and_work_are_those_of_a_clients_model() -> None:
    cost = ls.cost_table(LitMLP(), ls.LoRA(**OPTIONS), [2, 4], EXAMPLE).at[2]
    algorithm, lit = ls.LoRA([2, 4], **OPTIONS), LitMLP()
    client = client_of(algorithm.bind(lit, algorithm.new_state(lit, 0)).device_half, lit, 0.5)
    assert cost.parameters == sum(p.numel() for p in client.parameters())
    with FlopCounterMode(display=False) as counter:
        client(EXAMPLE)
    assert 2 * cost.macs == counter.get_total_flops()
    assert cost.macs == 5 * (6 * 12 + 12 * 12 + 12 * 3) + 5 * 2 * (6 + 12 + 12 + 12)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("aggregation", [ls.SampledTerms(), ls.FrozenA()], ids=repr)
@pytest.mark.parametrize("budgeted", sorted(NEEDS.keys() - {"memory"}))
def test_the_answer_fits_and_no_larger_rank_does(budgeted: str, aggregation: Any, several: bool) -> None:
    algorithm = ls.LoRA(aggregation=aggregation, **OPTIONS)
    ranks = range(1, 7)  # 6 is the smallest side
    tables = [ls.cost_table(LitMLP(), algorithm, [*ranks] if several else [rank], EXAMPLE) for rank in ranks]
    needed = {rank: getattr(table.at[rank], NEEDS[budgeted]) for rank, table in zip(ranks, tables, strict=True)}
    budgets = [need + change for need in needed.values() for change in (-1, 0, 1)][1:9]
    expected = [max(rank for rank in ranks if needed[rank] <= budget) for budget in budgets]
    if several:
        assert ls.largest_that_fits(LitMLP(), algorithm, EXAMPLE, **{budgeted: budgets}) == expected
    else:
        assert [
            ls.largest_that_fits(LitMLP(), algorithm, EXAMPLE, **{budgeted: budget}) for budget in budgets
        ] == expected


def test_what_lora_refuses_has_no_cost() -> None:
    with pytest.raises(ValueError, match=r"`rank` must be at most 6 for the layer 'net.0'.* got 8"):
        ls.cost_table(LitMLP(), ls.LoRA(**OPTIONS), [8], EXAMPLE)
    with pytest.raises(ValueError, match="give `example_input`"):
        ls.largest_that_fits(LitMLP(), ls.LoRA(), budget_macs=1e9)
    smallest = 2 * 4 * (6 + 12 + 12 + 12 + 12 * 3 + 3)
    with pytest.raises(ValueError, match=rf"No rank fits `budget_bytes=100`: .* takes {smallest}\. Raise the"):
        ls.largest_that_fits(LitMLP(), ls.LoRA(**OPTIONS), budget_bytes=100)
