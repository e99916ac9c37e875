"""FedMUD's rounds, written out slowly in float64, against `LoRA` that is merged into the base.

In FedMUD, each client trains a low-rank update U V of a frozen weight, in which one factor starts at zero and the other
at random. The server adds the average of the updates to the weight: that of the factors (plain), or that of the
products, which is the purpose of its aggregation-aware decomposition. Its code draws U and sets V to zero; this package
does the opposite, and so do the rounds below.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from federation import Fit, seeded
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.data import TensorDataset
from toy_models import LitNet

import lightning_spectral as ls
from lightning_spectral.algorithms.lora.aggregation import drawn_rows
from lightning_spectral.nn.adapters import adapted_layers

RANK, LR, STEPS = 2, 0.2, 4
SIZES = (9, 5, 16)  # examples of each client
Update = tuple[Tensor, Tensor]  # U, shape (c_out, r), and V, shape (r, c_in)


def plain() -> LitNet:
    return LitNet(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(), lr=LR)


def clients() -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(sum(SIZES), 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return list(zip(x.split(SIZES), x[:, :3].argmax(1).split(SIZES), strict=True))


def train(model: Mapping[str, Tensor], start: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[list[Update], Any]:
    """One client: plain SGD on U, V and the biases, with the weights frozen."""
    updates = [
        (v.new_zeros(len(model[f"net.{i}.weight"]), RANK), v.clone()) for i, v in zip((0, 2), start, strict=True)
    ]
    biases = [model["net.0.bias"].clone(), model["net.2.bias"].clone()]
    trained = [*updates[0], *updates[1], *biases]
    for _ in range(STEPS):
        for tensor in trained:
            tensor.requires_grad_()
        first, second = (model[f"net.{i}.weight"] + u @ v for i, (u, v) in zip((0, 2), updates, strict=True))
        loss = cross_entropy(linear(linear(x, first, biases[0]).tanh(), second, biases[1]), y)
        for tensor, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            tensor.detach_().sub_(LR * gradient)
    return updates, biases


def mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum((size / sum(SIZES) * tensor for size, tensor in zip(SIZES, tensors, strict=True)), torch.zeros(()))


def mean_of_factors(updates: Sequence[Update]) -> Tensor:
    return mean([u for u, _ in updates]) @ mean([v for _, v in updates])


def mean_of_products(updates: Sequence[Update]) -> Tensor:
    return mean([u @ v for u, v in updates])


def fed_mud(average: Callable[[Sequence[Update]], Tensor], draws: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """All rounds: the average of the updates goes into the weights, and the next ones start afresh."""
    model = {name: tensor.clone() for name, tensor in seeded(plain).state_dict().items()}
    for ids in draws:
        # the V of each layer: random, the same for all clients, and a new one in each round
        start = [
            drawn_rows(layer, RANK, model["net.0.weight"], 0, *ids) for layer in adapted_layers(plain(), ["*"], ())
        ]
        outcomes = [train(model, start, x, y) for x, y in clients()]
        for place, i in enumerate((0, 2)):
            model[f"net.{i}.weight"] += average([updates[place] for updates, _ in outcomes])
            model[f"net.{i}.bias"] = mean([biases[place] for _, biases in outcomes])
    return model


@pytest.mark.parametrize(
    ("options", "average", "other", "draws"),
    [
        ({"aggregation": ls.PaddedFactors(), "merge_every": 1}, mean_of_factors, mean_of_products, [(), (1,), (2,)]),
        ({"aggregation": ls.StackedProducts()}, mean_of_products, mean_of_factors, [(0,), (1,), (2,)]),
    ],
    ids=["factors averaged", "products averaged"],
)
def test_lora_that_goes_into_the_base_is_fed_mud(options: Any, average: Any, other: Any, draws: Any, fit: Fit) -> None:
    """With ``alpha`` the square root of the rank, an update counts once."""
    x, y = (torch.cat(parts) for parts in zip(*clients(), strict=True))
    owners = [client for client, size in enumerate(SIZES) for _ in range(size)]
    data = ls.FederatedDataModule(TensorDataset(x, y), ls.NaturalPartitioner(owners), batch_size=max(SIZES))
    algorithm = ls.LoRA(RANK, RANK**0.5, train=["*.bias"], **options)
    ours = fit(seeded(plain), data, algorithm=algorithm, clients_per_round=3, local_epochs=STEPS, max_epochs=3).state
    expected, before = fed_mud(average, draws), seeded(plain).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-12)
        assert float((tensor - before[name]).abs().max()) > 0.01
    assert float((fed_mud(other, draws)["net.0.weight"] - expected["net.0.weight"]).abs().max()) > 1e-6
