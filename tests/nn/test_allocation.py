"""Terms go where a gradient says that they are worth most, for no more than equal ratios cost."""

from itertools import product
from typing import Any

import pytest
import torch
from federation import same_state, seeded
from torch import Tensor, nn
from toy_models import Net

import lightning_spectral as ls
from lightning_spectral.nn import LayerChoices, allocate_terms, plan_layers


class Three(nn.Module):
    """Three layers of the same shape between two that stay whole, and a normalisation with averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*size) for size in [(5, 8), (8, 8), (8, 8), (8, 8), (8, 3)])
        self.norm = nn.BatchNorm1d(8)
        with torch.no_grad():
            self.layers[2].weight.mul_(4.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](self.norm(x))


X, Y = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3


def loss(net: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(net(X), Y)


def held(module: nn.Module, choices: LayerChoices, keep_ratio: float) -> list[int]:
    return [block.num_terms(keep_ratio) for block in plan_layers(module, choices=choices).blocks.values()]


@pytest.mark.parametrize("keep_ratio", [0.25, 0.5])
def test_no_other_numbers_of_terms_hold_more_of_the_gradient(keep_ratio: float) -> None:
    net = seeded(Three)
    total = 3 * held(net, LayerChoices(), keep_ratio)[0]
    ours = held(net, allocate_terms(net, loss, keep_ratio), keep_ratio)
    loss(net).backward()
    energies = [torch.linalg.svdvals(layer.weight.grad).square() for layer in list(net.layers)[1:4]]

    def energy(counts: Any) -> float:
        return sum(float(of_layer[:n].sum()) for of_layer, n in zip(energies, counts, strict=True))

    best = max([counts for counts in product(range(1, 9), repeat=3) if sum(counts) == total], key=energy)
    assert ours == list(best) != [total // 3] * 3
    assert energy(ours) > energy([total // 3] * 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"term_granularity": 3}, {"keep_first_and_last_dense": False}], ids=str)
def test_sub_models_cost_at_most_what_they_would_and_the_module_is_restored(options: Any) -> None:
    net = seeded(Three)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    equal = LayerChoices(exclude=["norm"], **options)
    chosen = allocate_terms(net, loss, 0.4, X, equal)
    assert same_state(net.state_dict(), before)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (chosen.exclude, chosen.term_granularity) == (equal.exclude, equal.term_granularity)
    costs = [ls.cost_table(net, ls.SpectralSharding(layers=c), [0.4], X).at[0.4].round_bytes for c in (equal, chosen)]
    smallest_step = 8 * options.get("term_granularity", 1) * 16  # bytes there and back, of one more term
    assert costs[0] - 4 * smallest_step < costs[1] <= costs[0]


def recurrent() -> Net:
    """Layers with several matrices, of several shapes."""

    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        x, _ = net.attention(x, x, x)
        x, _ = net.lstm(x)
        return net.last(x[:, -1])

    layers = {"first": nn.Linear(6, 8), "last": nn.Linear(12, 2)}
    attention, lstm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LSTM(8, 12, batch_first=True)
    return Net(forward, **layers, attention=attention, lstm=lstm)


def test_layers_of_several_matrices_get_one_factor() -> None:
    net, x = seeded(recurrent), torch.randn(9, 4, 6, generator=torch.Generator().manual_seed(0))
    chosen = allocate_terms(net, lambda net: net(x).square().mean(), 0.3, x)
    assert chosen.ratio_factors.keys() == {"attention", "attention.out_proj", "lstm"}
    plans = [plan_layers(net, x, choices) for choices in (LayerChoices(), chosen)]
    values = [sum(b.num_terms(0.3) * sum(b.shape) for b in plan.blocks.values()) for plan in plans]
    assert values[1] <= values[0]
    counts = [[block.num_terms(0.3) for block in plan.blocks.values()] for plan in plans]
    assert counts[0] != counts[1]


def test_a_ratio_beyond_one_is_named() -> None:
    with pytest.raises(ValueError, match="keep_ratio"):
        allocate_terms(seeded(Three), loss, 1.5)
    with pytest.raises(ValueError, match="No layer of this module can be sharded"):
        allocate_terms(nn.Linear(3, 2), lambda net: net(torch.ones(3)).sum(), 0.5)
