import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_spectral.client.local_optimizer import options_of, rebuild_optimizer
from lightning_spectral.client.user_optimizers import recipe_of

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


class ClippedSGD(torch.optim.SGD):
    """Has an argument that is no option, a method kept as an attribute, and counters of every kind."""

    def __init__(self, params: Any, lr: float, largest: float) -> None:
        super().__init__(params, lr=lr)
        self.largest = largest
        self.num_steps = [0]
        self.clip = self.clip_by_value

    def clip_by_value(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-self.largest, self.largest)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps[0] += 1
        self.last_step = self.num_steps[0]
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for parameter in group["params"]:
                self.clip(parameter)
        super().step()


def rebuilt(template: torch.optim.Optimizer, server: nn.Module) -> tuple[nn.Module, Any]:
    client = copy.deepcopy(server)
    return client, rebuild_optimizer(recipe_of(template, server), client)


def test_arguments_that_are_no_options_reach_the_clients() -> None:
    server = nn.Linear(3, 2)
    template = ClippedSGD(server.parameters(), lr=1.0, largest=0.01)
    client, local = rebuilt(template, server)
    template.largest = 5.0  # later changes of the template are not the recipe's
    local.start_client(options_of(template))
    step(local.optimizer, client)
    change = client.weight.detach() - server.weight.detach()  # type: ignore[operator]
    assert float(change.abs().max()) == pytest.approx(0.01, rel=1e-4)
    assert local.optimizer.clip.__self__ is local.optimizer


def test_counters_do_not_run_on_from_client_to_client() -> None:
    server = nn.Linear(3, 2)
    template = ClippedSGD(server.parameters(), lr=1.0, largest=0.01)
    client, local = rebuilt(template, server)
    for _ in range(2):
        local.start_client(options_of(template))
        assert not hasattr(local.optimizer, "last_step")
        step(local.optimizer, client)
        step(local.optimizer, client)
        assert (local.optimizer.num_steps, local.optimizer.last_step) == ([2], 2)
        assert local.optimizer.param_groups[0]["num_steps"] == 2
    assert template.num_steps == [0]


def test_a_learning_rate_that_is_a_tensor_is_not_shared() -> None:
    server = nn.Linear(3, 2)
    template = torch.optim.SGD(server.parameters(), lr=torch.tensor(0.5))
    _, local = rebuilt(template, server)
    local.start_client(options_of(template))
    local.optimizer.param_groups[0]["lr"].mul_(2)
    assert float(template.param_groups[0]["lr"]) == 0.5


def test_recipes_with_attributes_of_all_kinds_can_be_pickled() -> None:
    server = nn.Linear(3, 2)
    template = torch.optim.SGD(server.parameters(), lr=0.5)
    template.owner, template.scale = template, torch.tensor(3.0)  # type: ignore[attr-defined]
    recipe = pickle.loads(pickle.dumps(recipe_of(template, server)))
    local = rebuild_optimizer(recipe, copy.deepcopy(server))
    assert local.optimizer.owner is local.optimizer  # type: ignore[attr-defined]
    assert float(local.optimizer.scale) == 3.0  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="optimizers take names since torch 2.6")
def test_named_parameters_have_the_clients_names() -> None:
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    template = torch.optim.SGD([(name, p) for name, p in server.named_parameters() if "weight" in name], lr=0.5)
    client, local = rebuilt(template, server)
    local.start_client(options_of(template))
    (group,) = local.optimizer.param_groups
    assert group["param_names"] == ["0.weight", "1.weight"]
    assert group["params"][1] is client[1].weight  # type: ignore[index]


class Wrapper(torch.optim.Optimizer):
    """Like many a Lookahead: it shares the groups of the optimizer that it wraps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.base = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults


def with_attribute(server: nn.Module, make: Any) -> torch.optim.Optimizer:
    template = torch.optim.SGD(server.parameters(), lr=0.1)
    template.extra = make(server)  # type: ignore[attr-defined]
    return template


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda server: Wrapper(torch.optim.SGD(server.parameters(), lr=0.1)),
            r"^Wrapper wraps another .*SGD, in `base",
        ),
        (lambda server: with_attribute(server, lambda s: [s.weight]), "`extra` holds the server's parameters"),
        (lambda server: with_attribute(server, lambda s: s), "`extra` holds the server's parameters"),
        (
            lambda server: with_attribute(server, lambda s: [p.detach().clone() for p in s.parameters()]),
            "`extra` holds .*, or a tensor for each of them; keep such tensors in `self.state",
        ),
        (
            lambda server: with_attribute(server, lambda s: threading.Lock()),
            "its `extra` cannot be copied: cannot pickle",
        ),
    ],
    ids=["wrapper", "parameter", "module", "copies", "lock"],
)
def test_an_optimizer_that_keeps_what_is_the_servers_is_refused(make: Any, message: str) -> None:
    server = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=message):
        recipe_of(make(server), server)


def test_a_step_replaced_on_the_instance_is_refused_unless_a_scheduler_did_it() -> None:
    server = nn.Linear(3, 2)
    template = torch.optim.SGD(server.parameters(), lr=0.1)
    StepLR(template, step_size=1)
    recipe_of(template, server)
    template.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    with pytest.raises(ValueError, match=r"`step` of this SGD was replaced on the instance.*in a subclass of SGD"):
        recipe_of(template, server)


def test_a_client_starts_from_the_state_that_the_constructor_makes() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, lr=lr)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"] = torch.zeros_like(parameter)

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["sum"].add_(1.0)

    server = nn.Linear(3, 2)
    template = Counting(server.parameters())
    local = rebuild_optimizer(recipe_of(template, server), copy.deepcopy(server))
    for _ in range(2):
        local.start_client(options_of(template))
        step(local.optimizer, nn.Linear(3, 2))
        assert all(torch.equal(state["sum"], torch.ones_like(p)) for p, state in local.optimizer.state.items())
        assert len(local.optimizer.state) == 2
