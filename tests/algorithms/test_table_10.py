"""ResNet-18 on CIFAR at batch 32 against Niu et al. (2023), Tables 1 and 10, difference by difference."""

import math
from collections.abc import Iterator

import pytest
import torch

from lightning_spectral import SpectralSharding, cost_table
from lightning_spectral.models import ResNet18
from lightning_spectral.nn import CostTable, LayerChoices, plan_layers
from lightning_spectral.nn.layers.terms import rebuilding_is_cheaper

# keep ratio: parameters in millions, "MACs" in billions, values of activations in millions
PRINTED = {0.8: (9.9, 28.8, 44.9), 0.6: (7.4, 22.4, 40.5), 0.4: (4.9, 16.0, 36.1), 0.2: (2.5, 7.4, 31.7)}
# the same of "PriSM", whose outputs are cut
PRINTED_CUT = {0.8: (7.9, 25.5, 37.0), 0.6: (4.5, 14.7, 28.3), 0.4: (2.0, 6.87, 18.9), 0.2: (0.5, 2.0, 9.5)}
FULL = (11, 35, 31.5)
BATCH = 32
UNIT = BATCH * 64 * 32 * 32  # values behind a convolution of the first stage
STAGES = ((64, 64, 32), (64, 128, 16), (128, 256, 8), (256, 512, 4))  # channels before, channels, height


def convolutions() -> Iterator[tuple[int, int, int]]:
    """Rows, columns and positions of each 3x3 convolution after the stem."""
    for before, after, height in STAGES:
        for channels in (before, after, after, after):
            yield after, 9 * channels, BATCH * height**2


@pytest.fixture(scope="module")
def table() -> CostTable:
    net = ResNet18()
    plan = plan_layers(net, torch.zeros(1, 3, 32, 32), LayerChoices(exclude=["*.shortcut.*"]))
    return cost_table(net, SpectralSharding(layers=plan), [*PRINTED], torch.zeros(BATCH, 3, 32, 32))


@pytest.mark.slow
def test_the_whole_model_is_that_of_the_table_and_its_macs_are_floating_point_operations(table: CostTable) -> None:
    assert math.floor(table.full.parameters / 1e6) == FULL[0]
    assert math.floor(2 * table.full.macs / 1e9) == FULL[1]


@pytest.mark.slow
def test_parameters_are_the_tables_and_what_it_leaves_out(table: CostTable) -> None:
    outside = 3 * 9 * 64 + 512 * 10 + 10  # stem and head
    outside += sum(b * a for b, a, _ in STAGES[1:])  # shortcuts
    outside += 2 * (64 + sum(4 * a for _, a, _ in STAGES) + sum(a for _, a, _ in STAGES[1:]))  # normalisations
    for keep_ratio, (parameters, _, _) in PRINTED.items():
        # one in its last digit: the table prints 4.95 as 4.9 and 2.48 as 2.5
        without_rounding = sum(keep_ratio * rows * (rows + columns) for rows, columns, _ in convolutions())
        assert abs(without_rounding / 1e6 - parameters) < 0.1
        rounded_up = sum(math.ceil(keep_ratio * rows) * (rows + columns) for rows, columns, _ in convolutions())
        assert table.at[keep_ratio].parameters == rounded_up + outside


@pytest.mark.slow
def test_macs_follow_the_parameters_layer_by_layer_where_the_tables_do_not(table: CostTable) -> None:
    inside = sum(rows * columns * positions for rows, columns, positions in convolutions())
    more_than_printed = []
    for keep_ratio, (_, printed, _) in PRINTED.items():
        of_terms = sum(math.ceil(keep_ratio * rows) * (rows + cols) * p for rows, cols, p in convolutions())
        assert table.at[keep_ratio].macs == table.full.macs - inside + of_terms
        least = 2 * sum(keep_ratio * rows * (rows + columns) * p for rows, columns, p in convolutions())
        more_than_printed.append(round(100 * (least / 1e9 / printed - 1)))
    assert more_than_printed == [9, 5, -2, 6]  # percent: what the table's own parameters take


@pytest.mark.slow
def test_values_kept_are_two_for_each_position_of_a_convolution_and_what_the_table_leaves_out(table: CostTable) -> None:
    behind_convolutions = 2 * sum(rows * positions for rows, _, positions in convolutions())
    assert behind_convolutions == 15 * UNIT
    assert round(behind_convolutions / 1e6, 1) == FULL[2]
    shortcuts = sum(BATCH * after * height**2 for _, after, height in STAGES[1:])
    norms = 20 * 2 * 2 * BATCH  # mean and deviation of two groups
    assert table.full.kept_values == behind_convolutions + 2 * UNIT + shortcuts + norms + BATCH * 512
    for keep_ratio in PRINTED:
        terms = sum(math.ceil(keep_ratio * rows) * (positions + rows) for rows, _, positions in convolutions())
        assert table.at[keep_ratio].kept_values == table.full.kept_values + terms


def test_the_tables_activations_are_not_the_full_models_and_those_between_the_factors() -> None:
    behind = sum(rows * positions for rows, _, positions in convolutions())
    more_than_that = [round(100 * (kept * 1e6 / ((2 + r) * behind) - 1)) for r, (_, _, kept) in PRINTED.items()]
    assert more_than_that == [2, -1, -4, -8]  # percent


def test_the_tables_cut_models_have_their_inputs_and_the_sums_along_the_shortcuts_cut_too() -> None:
    """All of "PriSM"'s parameters, work and activations are those of a net with a share r of all channels."""
    behind, outside = sum(rows * positions for rows, _, positions in convolutions()), 0.52e9  # stem, shortcuts, head
    for keep_ratio, (parameters, macs, kept) in PRINTED_CUT.items():
        of_convolutions = [keep_ratio * rows * keep_ratio * (rows + columns) for rows, columns, _ in convolutions()]
        assert abs(sum(of_convolutions) / 1e6 - parameters) < 0.1  # one in the last digit
        work = 2 * sum(n * p for n, (_, _, p) in zip(of_convolutions, convolutions(), strict=True)) + outside
        assert abs(work / 1e9 / macs - 1) < 0.05
        assert abs(3 * keep_ratio * behind / 1e6 - kept) < (1 if kept == 37.0 else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [0.6, 0.2])  # more and less than half of the outputs
def test_outputs_that_are_cut_save_what_lies_between_the_shortcuts(ratio: float, table: CostTable) -> None:
    """Inputs of a block are whole: they are sums of the block before and its input."""
    choices = LayerChoices(exclude=["*.shortcut.*"], output_ratio=ratio)
    cost = cost_table(ResNet18(), SpectralSharding(layers=choices), [ratio], torch.zeros(BATCH, 3, 32, 32)).at[ratio]
    convolved, macs, kept = [], 0, 0
    for i, (rows, columns, positions) in enumerate(convolutions()):
        n = held = math.ceil(ratio * rows)
        is_second = i % 2 == 1
        used = 9 * held if is_second else columns  # behind the first convolution, only what is held
        convolved.append(n * (held + columns))
        if rebuilding_is_cheaper(positions, n, held, used):  # of a square that is held with all of its terms
            macs += (n + positions) * held * used
            kept += n * held + held * used
        else:
            macs += n * (held + used) * positions
            kept += n * (held + positions)
        activation = rows if is_second else held  # behind the second convolution follows the sum with the shortcut
        kept += (held + activation) * positions - 2 * BATCH * (held <= rows / 2)  # statistics of one group, not of two
    inside = sum(rows * columns for rows, columns, _ in convolutions())
    assert cost.parameters == table.full.parameters - inside + sum(convolved)
    assert cost.macs == table.full.macs - sum(rows * c * positions for rows, c, positions in convolutions()) + macs
    assert cost.kept_values == table.full.kept_values - 15 * UNIT + kept
