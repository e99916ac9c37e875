"""What may be an example input, and what is said of a module that has no `forward` to run it in."""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import lightning_spectral as ls
from lightning_spectral.nn.cost import count_pass

Batch = namedtuple("Batch", "x y")


class OfBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3))

    def forward(self, batch: Batch) -> Tensor:
        output: Tensor = self.net(batch.x)
        return output


class OfSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, sequences: PackedSequence) -> Tensor:
        output: Tensor = self.head(self.lstm(sequences)[0].data)
        return output


class LitWithoutForward(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = OfBatches().net


@pytest.mark.parametrize(
    "show",
    [
        ls.validate,
        lambda net, x: ls.cost_table(net, ls.SpectralSharding(), [0.5], x),
        lambda net, x: ls.largest_that_fits(net, ls.SpectralSharding(), x, budget_macs=1e6),
    ],
)
def test_a_module_without_forward_is_named(show: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"LitWithoutForward has no `forward`.*such as `module\.net`"):
        show(LitWithoutForward(), torch.zeros(1, 6))


def test_a_part_without_forward_keeps_its_own_error() -> None:
    with pytest.raises(NotImplementedError, match="ModuleList"):
        ls.validate(nn.Sequential(nn.ModuleList()), torch.zeros(1))


def test_a_named_tuple_is_one_input() -> None:
    batch = Batch(torch.zeros(5, 6), torch.zeros(5))
    assert ls.validate(OfBatches(), batch).layers[0].in_forward
    assert ls.cost_table(OfBatches(), ls.SpectralSharding(), [0.5], batch).full.macs == 5 * (6 * 12 + 12 * 12 + 12 * 3)


def test_packed_sequences_are_one_input() -> None:
    packed, net = pack_sequence([torch.zeros(4, 6), torch.zeros(2, 6)]), OfSequences()
    assert all(layer.in_forward for layer in ls.validate(net, packed).layers)
    counted = count_pass(net, packed)
    assert counted.macs == 6 * (4 * 8 * (6 + 8) + 8 * 3)  # six positions, four gates
    kept = count_pass(nn.Sequential(nn.Linear(6, 8)), packed.data)
    assert counted.kept_values > kept.kept_values == 0  # inputs are not counted
