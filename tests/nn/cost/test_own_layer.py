"""A sharded layer of another package: its own class says what it costs, and the counts agree."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_spectral.nn import (
    BlockCall,
    LayerPlan,
    ModulePlan,
    ShardedLayer,
    SpectralShardedLayer,
    WeightBlock,
    replace_layers,
)
from lightning_spectral.nn.cost.costs import Costs, costs_of
from lightning_spectral.nn.cost.counted_pass import count_pass
from lightning_spectral.testing import check_sharded_layer


class Mix(nn.Module):
    """Mixes vectors that are columns, the second argument, and gates the result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)))

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.weight @ x)


class WithoutCosts(SpectralShardedLayer):
    """Always applies the factors, and leaves the costs as they are for a linear layer."""

    @classmethod
    def like(cls, dense: Any, num_terms: Any) -> Any:
        (n,) = num_terms
        return cls(tuple(dense.weight.shape), n, False, dense.weight.device, dense.weight.dtype)

    def forward(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * (self.scaled_u() @ (self.v @ x))


class ShardedMix(WithoutCosts):
    """The same with costs of its own."""

    def matrix_inputs(self, gate: Tensor, x: Tensor) -> Sequence[Tensor]:
        return (x,)

    def num_positions(self, input: Tensor, output: Any) -> int:
        return input.shape[1]

    @classmethod
    def macs_of_terms(cls, block: WeightBlock, call: BlockCall, num_terms: int) -> int:
        return call.num_positions * num_terms * sum(block.shape)

    @classmethod
    def kept_by_terms(cls, block: WeightBlock, call: BlockCall, num_terms: int) -> int:
        return num_terms * (block.shape[0] + call.num_positions)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.mix, self.after = nn.Linear(5, 6), Mix(), nn.Linear(8, 2)
        self.gate = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.mix(self.gate, x=self.before(x).T).T)


EXAMPLE = torch.zeros(200, 5)  # so many positions that a linear layer would rebuild its weight at all terms


def planned(sharded: type[ShardedLayer]) -> tuple[Net, ModulePlan, Costs]:
    net = Net()
    blocks = tuple(block.within("mix") for block in sharded.blocks_of(net.mix))
    plan = ModulePlan((LayerPlan("mix", "Mix", ((8, 6),), blocks, sharded, "of another package"),))
    return net, plan, costs_of(net, EXAMPLE, plan)


def counted(module: nn.Module) -> tuple[int, int, int]:
    with FlopCounterMode(display=False) as counter:
        module(EXAMPLE)
    passed = count_pass(module, EXAMPLE)
    return counter.get_total_flops() // 2, passed.kept_values, passed.kept_bytes


def test_the_layer_keeps_the_contract() -> None:
    gate, x = torch.ones(8, 1).double(), torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).double()
    check_sharded_layer(ShardedMix, Mix().double(), gate, x)

    class Shifted(ShardedMix):
        def forward(self, gate: Tensor, x: Tensor) -> Tensor:
            return super().forward(gate, x) + 1.0

    with pytest.raises(AssertionError, match="differs"):
        check_sharded_layer(Shifted, Mix().double(), gate, x)


@pytest.mark.parametrize("keep_ratio", [0.1, 0.5, 1.0])
def test_costs_are_those_that_the_layer_says(keep_ratio: float) -> None:
    net, plan, costs = planned(ShardedMix)
    cost = costs.at(keep_ratio)
    assert (cost.macs, cost.kept_values, cost.kept_bytes) == counted(replace_layers(net, keep_ratio, layers=plan))


def test_costs_that_nobody_states_are_those_of_a_linear_layer_and_may_be_wrong() -> None:
    net, plan, costs = planned(WithoutCosts)
    macs, kept_values, _ = counted(replace_layers(net, 1.0, layers=plan))
    assert costs.at(1.0).macs != macs
    assert costs.at(1.0).kept_values != kept_values
