import copy
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from lightning_spectral.client.forms import Forms
from lightning_spectral.client.user_optimizer import LocalOptimizer, StandIn, check_optimizer, options_of

OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.2),
    lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
]


def whole(module: nn.Module, capacity: float) -> None:
    """The form of a client that has the server's parameters."""


def replaced(module: nn.Module, capacity: float) -> None:
    """The form of a client that has others in their place, of equal value."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(parameter.detach().clone())


@contextmanager
def client_of(
    optimizer: Optimizer, server: nn.Module, take_form: Any = replaced, options: Any = None, **follow: Any
) -> Iterator[Any]:
    """The server as a client that the optimizer steps."""
    names = {id(parameter): name for name, parameter in server.named_parameters()}
    with Forms(server, take_form, (optimizer,)).client(1.0) as client:
        local = LocalOptimizer(optimizer, names, client, **follow)
        local.start_client(options_of(optimizer) if options is None else options)
        yield client


def step(optimizer: Optimizer, module: nn.Module) -> None:
    optimizer.zero_grad()
    module(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def values(module: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def same(one: Sequence[Tensor], two: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_every_client_starts_afresh_with_the_rounds_learning_rate() -> None:
    server = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(server.parameters(), lr=1.0, momentum=0.9)
    schedule = StepLR(optimizer, step_size=1, gamma=0.1)
    with client_of(optimizer, server) as client:
        step(optimizer, client)
        assert optimizer.state
    optimizer.step()
    schedule.step()
    with client_of(optimizer, server):
        assert optimizer.state == {}
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


@pytest.mark.parametrize("take_form", [whole, replaced])
def test_groups_their_order_and_left_out_parameters_are_the_users(take_form: Any) -> None:
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": [server[1].weight], "lr": 1.0}, {"params": [server[0].weight], "lr": 2.0}], lr=0.5, weight_decay=0.1
    )
    groups = optimizer.param_groups
    with client_of(optimizer, server, take_form) as client:
        assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [(1.0, 0.1, 1), (2.0, 0.1, 1)]
        assert groups[0]["params"][0] is client[1].weight
        assert groups[1]["params"][0] is client[0].weight


def test_options_that_differ_are_those_of_a_group_of_their_own() -> None:
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(server.parameters(), lr=0.5, weight_decay=0.1)

    half = StandIn("1.weight", lambda options: {"weight_decay": options["weight_decay"] / 2})
    groups = optimizer.param_groups
    with client_of(optimizer, server, stand_ins={"1.weight": half}) as client:
        own = dict(client.named_parameters())
        assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.5, 0.1), (0.5, 0.05)]
        assert [id(p) for p in groups[0]["params"]] == [id(own[name]) for name in ("0.weight", "0.bias", "1.bias")]
        assert groups[1]["params"][0] is own["1.weight"]
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(4, 0.1)]


def test_a_group_is_divided_only_in_rounds_in_which_its_options_differ() -> None:
    """A schedule may decay weights later; as many groups as the user has are stepped in fewer operations."""
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(server.parameters(), lr=0.5)
    never = StandIn("1.weight", lambda options: {"weight_decay": 0.0} if options["weight_decay"] else {})
    groups = optimizer.param_groups
    for decay, expected in ((0.0, [(4, 0.0)]), (0.1, [(3, 0.1), (1, 0.0)])):
        options = [{**options_of(optimizer)[0], "weight_decay": decay}]
        with client_of(optimizer, server, options=options, stand_ins={"1.weight": never}) as client:
            assert [(len(g["params"]), g["weight_decay"]) for g in groups] == expected
            assert {id(p) for g in groups for p in g["params"]} == {id(p) for p in client.parameters()}


def test_a_parameter_is_stepped_with_the_group_of_the_one_that_it_stands_for() -> None:
    server: Any = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = torch.optim.SGD([{"params": [server[0].weight], "lr": 1.0}, {"params": [server[1].weight], "lr": 2.0}])

    def take_form(module: Any, capacity: float) -> None:
        del module[1].weight
        module[1].u, module[1].v, module[1].untrained = (nn.Parameter(torch.ones(2)) for _ in range(3))

    stand_ins = {"1.u": StandIn("1.weight"), "1.v": StandIn("1.weight"), "1.untrained": StandIn("")}
    groups = optimizer.param_groups
    with client_of(optimizer, server, take_form, stand_ins=stand_ins) as client:
        assert [[id(p) for p in group["params"]] for group in groups] == [
            [id(client[0].weight)],
            [id(client[1].u), id(client[1].v)],
        ]
        assert [group["lr"] for group in groups] == [1.0, 2.0]


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


def test_arguments_that_are_no_options_reach_the_clients() -> None:
    server = nn.Linear(3, 2)
    start = values(server)
    optimizer = ClippedSGD(server.parameters(), lr=1.0, largest=0.01)
    for _ in range(2):
        with client_of(optimizer, server) as client:
            step(optimizer, client)
            change = client.weight.detach() - start[0]
            assert float(change.abs().max()) == pytest.approx(0.01, rel=1e-4)
            optimizer.largest = 5.0  # changes of a client are its own


@pytest.mark.parametrize("take_form", [whole, replaced])
def test_counters_do_not_run_on_from_client_to_client(take_form: Any) -> None:
    server = nn.Linear(3, 2)
    optimizer = ClippedSGD(server.parameters(), lr=1.0, largest=0.01)
    for _ in range(2):
        with client_of(optimizer, server, take_form) as client:
            assert not hasattr(optimizer, "last_step")
            step(optimizer, client)
            step(optimizer, client)
            assert (optimizer.num_steps, optimizer.last_step) == ([2], 2)
            assert optimizer.param_groups[0]["num_steps"] == 2
        assert optimizer.num_steps == [0]
        assert "num_steps" not in optimizer.param_groups[0]


@pytest.mark.parametrize("take_form", [whole, replaced])
def test_a_learning_rate_that_is_a_tensor_is_not_shared(take_form: Any) -> None:
    server = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(server.parameters(), lr=torch.tensor(0.5))
    options = options_of(optimizer)
    for _ in range(2):
        with client_of(optimizer, server, take_form, options):
            assert float(optimizer.param_groups[0]["lr"]) == 0.5
            optimizer.param_groups[0]["lr"].mul_(2)
    assert float(optimizer.param_groups[0]["lr"]) == float(options[0]["lr"]) == 0.5


def test_an_optimizer_that_is_pickled_with_its_module_steps_it() -> None:
    server = nn.Linear(3, 2)
    optimizer, there = pickle.loads(pickle.dumps((torch.optim.SGD(server.parameters(), lr=0.5), server)))
    with client_of(optimizer, there) as client:
        step(optimizer, client)
        assert not same(values(client), values(server))
    assert same(values(there), values(server))


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="optimizers take names since torch 2.6")
def test_named_parameters_have_the_clients_names() -> None:
    server = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([(name, p) for name, p in server.named_parameters() if "weight" in name], lr=0.5)
    with client_of(optimizer, server) as client:
        (group,) = optimizer.param_groups
        assert group["param_names"] == ["0.weight", "1.weight"]
        assert group["params"][1] is client[1].weight


class Lookahead(Optimizer):
    """Shares the groups and the state of the optimizer that it wraps, as many do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.base = optimizer
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class Sum(Optimizer):
    """Steps by two optimizers that have lists of groups of their own."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, {"lr": 0.0})
        self.both = [torch.optim.SGD(params, lr=0.1), torch.optim.Adam(params, lr=0.2)]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.both:
            optimizer.step()


WRAPPERS: dict[str, Callable[[Any], Optimizer]] = {
    "shared groups": lambda params: Lookahead(torch.optim.SGD(params, lr=0.1, momentum=0.9)),
    "groups of their own": Sum,
}


@pytest.mark.parametrize("take_form", [whole, replaced])
@pytest.mark.parametrize("make", [*OPTIMIZERS, *WRAPPERS.values()])
def test_the_users_optimizer_steps_a_client_as_a_module_of_its_own(make: Any, take_form: Any) -> None:
    server = nn.Linear(3, 2)
    twin, start = copy.deepcopy(server), values(server)
    optimizer, expected = make(server.parameters()), make(twin.parameters())
    before = repr((optimizer.state, optimizer.param_groups))
    for _ in range(3):
        step(expected, twin)
    for _ in range(2):  # clients, each of which starts afresh
        with client_of(optimizer, server, take_form) as client:
            for _ in range(3):
                step(optimizer, client)
            assert same(values(client), values(twin))
        assert same(values(server), start)
        assert not same(values(twin), start)
        assert repr((optimizer.state, optimizer.param_groups)) == before
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], server.parameters(), strict=True))


def with_attribute(server: nn.Module, make: Any) -> Optimizer:
    optimizer: Any = torch.optim.SGD(server.parameters(), lr=0.1)
    optimizer.extra = make(server)
    return optimizer  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda server: server.weight, lambda server: [server.weight]], ids=["one", "list"])
def test_an_optimizer_that_keeps_parameters_besides_its_groups_steps_whole_clients_alone(make: Any) -> None:
    server = nn.Linear(3, 2)
    optimizer = with_attribute(server, make)
    check_optimizer(optimizer)
    with client_of(optimizer, server, whole) as client:
        step(optimizer, client)
    with (
        pytest.raises(ValueError, match=r"SGD keeps parameters of the module in `extra`, besides .* with `exclude`"),
        client_of(optimizer, server, replaced),
    ):
        pass


@pytest.mark.parametrize(
    "make",
    [lambda server: server, lambda server: threading.Lock(), lambda server: endless()],
    ids=["module", "lock", "a list that contains itself"],
)
def test_an_optimizer_may_keep_its_module_and_what_cannot_be_copied(make: Any) -> None:
    server = nn.Linear(3, 2)
    start, optimizer = values(server), with_attribute(server, make)
    check_optimizer(optimizer)
    with client_of(optimizer, server) as client:
        step(optimizer, client)
        assert not same(values(client), start)
    assert same(values(server), start)


def endless() -> list[Any]:
    values: list[Any] = [torch.zeros(2)]
    values.append(values)
    return values


@pytest.mark.parametrize("kind", [list, type("OwnList", (list,), {}), lambda copies: OrderedDict(enumerate(copies))])
def test_an_optimizer_that_keeps_copies_of_all_parameters_is_refused(kind: Any) -> None:
    optimizer = with_attribute(nn.Linear(3, 2), lambda s: kind([p.detach().clone() for p in s.parameters()]))
    with pytest.raises(ValueError, match=r"`extra` holds a tensor for each parameter.*keep such tensors in `self.s"):
        check_optimizer(optimizer)


class Counting(torch.optim.SGD):
    """Its constructor makes its state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"].add_(1.0)


@pytest.mark.parametrize("take_form", [whole, replaced])
def test_a_client_starts_from_the_state_that_the_constructor_makes(take_form: Any) -> None:
    server = nn.Linear(3, 2)
    optimizer = Counting(server.parameters())
    for _ in range(2):
        with client_of(optimizer, server, take_form) as client:
            step(optimizer, client)
            assert all(torch.equal(optimizer.state[p]["sum"], torch.ones_like(p)) for p in client.parameters())
        assert len(optimizer.state) == 2
        assert all(torch.equal(optimizer.state[p]["sum"], torch.zeros_like(p)) for p in server.parameters())


def test_a_constructor_that_makes_its_state_and_needs_more_than_options_is_refused() -> None:
    class Strict(Counting):
        def __init__(self, params: Any, size: int) -> None:
            super().__init__(params)

    server = nn.Linear(3, 2)
    with (
        pytest.raises(ValueError, match=r"Strict makes its state in its constructor, .* Give its arguments defaults"),
        client_of(Strict(server.parameters(), 1), server),
    ):
        pass
