import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_spectral.client.local_optimizer import options_of, rebuild_optimizer, recipe_of

OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


def step(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    optimizer.zero_grad()
    module(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_rebuilt_optimizer_steps_as_the_users_would(make: Any) -> None:
    server = nn.Linear(3, 2)
    client, twin = copy.deepcopy(server), copy.deepcopy(server)
    template = make(server.parameters())
    local = rebuild_optimizer(recipe_of(template, server), client)
    local.start_client(options_of(template))
    expected = make(twin.parameters())
    for _ in range(3):
        step(local.optimizer, client)
        step(expected, twin)
    assert all(torch.equal(a, b) for a, b in zip(client.parameters(), twin.parameters(), strict=True))


def test_every_client_starts_afresh_with_the_rounds_learning_rate() -> None:
    server = nn.Linear(3, 2)
    template = torch.optim.SGD(server.parameters(), lr=1.0, momentum=0.9)
    schedule = StepLR(template, step_size=1, gamma=0.1)
    client = copy.deepcopy(server)
    local = rebuild_optimizer(recipe_of(template, server), client)
    step(local.optimizer, client)
    template.step()
    schedule.step()
    local.start_client(options_of(template))
    assert local.optimizer.state == {}
    assert local.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_groups_and_left_out_parameters_are_the_users() -> None:
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    template = torch.optim.SGD(
        [{"params": [server[0].weight], "lr": 1.0}, {"params": [server[1].weight], "lr": 2.0}], lr=0.5, weight_decay=0.1
    )
    client = copy.deepcopy(server)
    local = rebuild_optimizer(
        recipe_of(template, server), client, overrides=lambda name: {"weight_decay": 0.0} if name == "1.weight" else {}
    )
    local.start_client(options_of(template))
    groups = local.optimizer.param_groups
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [(1.0, 0.1, 1), (2.0, 0.0, 1)]
    assert groups[0]["params"][0] is client[0].weight


def test_groups_keep_the_users_order() -> None:
    server = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    template = torch.optim.SGD([{"params": [server[1].weight], "lr": 1.0}, {"params": [server[0].weight], "lr": 2.0}])
    local = rebuild_optimizer(recipe_of(template, server), copy.deepcopy(server))
    local.start_client(options_of(template))
    assert [group["lr"] for group in local.optimizer.param_groups] == [1.0, 2.0]
    assert local.followed == (0, 1)


def test_optimizer_that_needs_a_closure_is_refused() -> None:
    server = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="LBFGS needs a closure"):
        recipe_of(torch.optim.LBFGS(server.parameters()), server)


def test_optimizer_that_cannot_be_rebuilt_is_refused() -> None:
    class Odd(torch.optim.SGD):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lr=0.1)

    server = nn.Linear(3, 2)
    recipe = recipe_of(Odd(server.parameters(), secret=1), server)
    with pytest.raises(ValueError, match=r"Odd cannot be rebuilt.*secret"):
        rebuild_optimizer(recipe, copy.deepcopy(server))
