"""The table's face: text, dictionary, picture, loggers; and the budgets that are read from it."""

from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import lightning_spectral as ls
from lightning_spectral import cost_table, largest_that_fits
from lightning_spectral.nn import Cost
from lightning_spectral.nn.cost import show_bytes, show_count


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 20), nn.ReLU(), nn.Linear(20, 16), nn.Linear(16, 3))


EXAMPLE = torch.zeros(5, 6)


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 k"),
        (12_345, "12.3 k"),
        (999_949, "1000 k"),
        (11_173_962, "11.2 M"),
        (4e18, "4000 P"),
    ],
)
def test_counts_have_three_digits_and_a_unit(number: float, shown: str) -> None:
    assert show_count(number) == shown


def test_bytes_have_binary_units() -> None:
    assert [show_bytes(n) for n in (1023, 1024, 5 * 2**20, 300 * 2**30)] == [
        "1023 B",
        "1.00 KiB",
        "5.00 MiB",
        "300 GiB",
    ]


def test_the_table_reads_as_rows_of_keep_ratios_with_shares_of_the_whole_model() -> None:
    table = cost_table(mlp(), ls.SpectralSharding(), [0.5, 0.25], EXAMPLE)
    header, full, half, quarter = str(table).splitlines()
    assert header.split("  ")[0] == "keep ratio"
    assert full.startswith("full ")
    assert half.startswith("0.5 ")
    outside = 6 * 24 + 24 + 20 + 16 + 16 * 3 + 3
    inside = 5 * (24 + 20) + 4 * (20 + 16)  # a quarter of the terms of two layers
    assert f"{outside + inside} ({(outside + inside) / (outside + 24 * 20 + 20 * 16):.0%})" in quarter


def test_as_dict_has_every_number() -> None:
    table = cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE)
    assert list(table.as_dict()) == ["full", "0.5"]
    assert table.as_dict()["0.5"]["macs"] == table.at[0.5].macs


def test_any_logger_takes_the_numbers(tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    table = cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE)
    table.log(logger)
    assert logger.experiment.metrics[0]["cost/0.5/parameters"] == table.at[0.5].parameters


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_wandb_takes_the_table_too(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is in the `examples` extra")
    from lightning.pytorch.loggers import WandbLogger

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="test", offline=True, save_dir=tmp_path)
    cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE).log(logger)
    summary = dict(logger.experiment.summary)
    wandb.finish()
    assert summary["cost"]["nrows"] == 2
    assert summary["cost/0.5/parameters"] == cost_table(mlp(), ls.SpectralSharding(), [0.5], EXAMPLE).at[0.5].parameters


def test_the_picture_has_one_line_for_each_cost() -> None:
    pytest.importorskip("matplotlib", reason="comes with the `examples` extra")
    table = cost_table(mlp(), ls.SpectralSharding(), [0.5, 0.25], EXAMPLE)
    (axes,) = table.plot().axes
    lines = {line.get_label(): line for line in axes.lines}
    assert [*lines["parameters"].get_xdata()] == [0.25, 0.5]
    assert lines["MACs"].get_ydata()[1] == table.at[0.5].macs / table.full.macs


def test_a_cost_needs_an_example() -> None:
    with pytest.raises(ValueError, match="give `example_input`"):
        cost_table(mlp(), ls.SpectralSharding(), [0.5])


def test_every_problem_of_the_module_is_shown() -> None:
    with pytest.raises(ValueError, match="pattern 'nothing' matches no layer"):
        cost_table(mlp(), ls.SpectralSharding(exclude=["nothing"]), [0.5], EXAMPLE)


def test_a_keep_ratio_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="must be in \\(0, 1\\]"):
        cost_table(mlp(), ls.SpectralSharding(), [1.5], EXAMPLE)


def needs(cost: Cost) -> dict[str, int]:
    down_and_up = cost.downlink_bytes + cost.uplink_bytes
    return {"budget_bytes": down_and_up, "budget_macs": cost.macs, "budget_params": cost.parameters}


@pytest.mark.parametrize("budgeted", ["budget_bytes", "budget_macs", "budget_params"])
@pytest.mark.parametrize("term_granularity", [1, 4])
def test_the_answer_fits_and_no_larger_ratio_does(budgeted: str, term_granularity: int) -> None:
    """Every ratio of a fine grid is tried, and budgets just below, at and above what each takes."""
    algorithm = ls.SpectralSharding(layers=ls.LayerChoices(term_granularity=term_granularity))
    grid = [i / 240 for i in range(1, 241)]  # every multiple of 1/20 and 1/16, and others
    cost = {r: needs(c)[budgeted] for r, c in cost_table(mlp(), algorithm, grid, EXAMPLE).at.items()}
    budgets = sorted({value + change for value in cost.values() for change in (-1, 0, 1)})[1:]
    answers = largest_that_fits(mlp(), algorithm, EXAMPLE, **{budgeted: budgets})
    assert answers == [max(r for r in grid if cost[r] <= budget) for budget in budgets]


def test_one_budget_gives_one_ratio_that_an_algorithm_takes() -> None:
    ratio = largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=10**9)
    assert ratio == 1.0
    per_client = largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=(700, 900))
    # 255 + 44 * 6 + 36 * 5 = 699 and 255 + 44 * 8 + 36 * 7 = 859; one more term of the first layer takes 44 more
    assert ls.SpectralSharding(keep_ratio=per_client).keep_ratio == per_client == [6 / 20, 8 / 20]


def test_if_nothing_fits_the_smallest_cost_is_named() -> None:
    smallest = 255 + 44 + 36
    with pytest.raises(ValueError, match=rf"No keep ratio fits `budget_params={smallest - 1}`: .* takes {smallest}"):
        largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=[10**6, smallest - 1])
    assert largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, budget_params=smallest) == 1 / 20


@pytest.mark.parametrize("budgets", [{}, {"budget_macs": 1, "budget_params": 2}])
def test_exactly_one_budget_is_given(budgets: Any) -> None:
    with pytest.raises(ValueError, match=r"exactly one of budget_bytes, .*budget_macs, budget_params"):
        largest_that_fits(mlp(), ls.SpectralSharding(), EXAMPLE, **budgets)
