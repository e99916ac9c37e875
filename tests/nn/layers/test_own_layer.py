"""A sharded layer of another package keeps the contract, and its costs are counted."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import lightning_spectral as ls
from lightning_spectral.nn import LayerPlan, ModulePlan, SpectralShardedLayer, replace_layers
from lightning_spectral.testing import check_sharded_layer


class Mix(nn.Module):
    """Mixes vectors that are columns, the second argument, and gates the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.weight @ x)


class ShardedMix(SpectralShardedLayer):
    """Always applies the factors."""

    @classmethod
    def like(cls, dense: Any, num_terms: Any) -> Any:
        (n,) = num_terms
        return cls(tuple(dense.weight.shape), n, False, dense.weight.device, dense.weight.dtype)

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.scaled_u() @ (self.v @ x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix, self.after = nn.Linear(5, 6), Mix(), nn.Linear(8, 2)
        self.gate = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(self.gate, x=self.before(x).T).T)


EXAMPLE = torch.zeros(200, 5)  # so many positions that a linear layer would rebuild its weight at all terms


def test_the_layer_keeps_the_contract() -> None:
    gate, x = torch.ones(8, 1).double(), torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double()
    check_sharded_layer(ShardedMix, Mix().double(), gate, x)

    class Shifted(ShardedMix):
        def forward(self, gate: Tensor, x: Tensor) -> Tensor:
            return super().forward(gate, x) + 1.0

    with pytest.raises(AssertionError, match="differs"):
        check_sharded_layer(Shifted, Mix().double(), gate, x)


@pytest.mark.parametrize("keep_ratio", [0.1, 0.5, 1.0])
def test_its_costs_are_counted(keep_ratio: float) -> None:
    net = Net()
    blocks = tuple(block.within("mix") for block in ShardedMix.blocks_of(net.mix))
    plan = ModulePlan((LayerPlan("mix", "Mix", ((8, 6),), blocks, ShardedMix, "of another package"),))
    cost = ls.cost_table(net, ls.SpectralSharding(layers=plan), [keep_ratio], EXAMPLE).at[keep_ratio]
    client = replace_layers(net, keep_ratio, layers=plan)
    with FlopCounterMode(display=False) as counter:
        client(EXAMPLE)
    assert 2 * cost.macs == counter.get_total_flops()
    assert cost.macs == len(EXAMPLE) * (5 * 6 + math.ceil(keep_ratio * 6) * (6 + 8) + 8 * 2)
