"""One module is the server and every client in turn: what each of them is, and that none notices another."""

import copy
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from federation import Fit, same_state, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import lightning_spectral as ls
from lightning_spectral.client.device import ClientSide, StepActions
from lightning_spectral.client.forms import Forms, postponing_interrupts
from lightning_spectral.client.kept_state import KeptState
from lightning_spectral.client.user_optimizer import LocalOptimizer, options_of
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import named_state
from lightning_spectral.protocol.records import Download, WorkUnit


class Net(nn.Module):
    """With an attribute, a list of layers and a layer of each kind that a form may touch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale, self.listed, self.seen = 1.0, [self.first, self.middle], {"batches": [0]}

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


PLAN = ls.nn.width_plan(Net(), torch.zeros(2, 6))
EVERY_LAYER = ls.LayerChoices(keep_first_and_last_dense=False)
HALVES = {0.25: 0.5, 0.5: 0.5}
ALGORITHMS: dict[str, tuple[Any, tuple[float, ...]]] = {
    "FedAvg": (ls.FedAvg(), (1.0,)),
    "spectral": (ls.SpectralSharding(ls.Unbiased(), keep_ratio=HALVES, clip_tau=2.0), (0.25, 0.5)),
    "every layer spectral": (ls.SpectralSharding(keep_ratio=HALVES, layers=EVERY_LAYER), (0.25, 0.5)),
    "outputs cut": (ls.SpectralSharding(keep_ratio=HALVES, output_ratio=0.5), (0.25, 0.5)),
    "LoRA": (ls.LoRA({1: 0.5, 2: 0.5}), (0.5, 1.0)),
    "LoRA, alternating": (ls.LoRA(2, aggregation=ls.AlternatingFactors()), (1.0,)),
    "width": (ls.WidthSharding(keep_ratio=HALVES, scaler=True, plan=PLAN), (0.25, 0.5)),
    "width of each step": (ls.WidthSharding(keep_ratio=HALVES, step_widths=(0.25, 0.5), plan=PLAN), (0.25, 0.5)),
    "averages of each width": (
        ls.WidthSharding(keep_ratio=HALVES, step_widths=(0.25, 0.5), averages_per_width=True, plan=PLAN),
        (0.25, 0.5),
    ),
    "Zampling": (ls.Zampling(4, degree=3), (1.0,)),
    "FIARSE": (ls.FIARSE({0.25: 0.5, 1.0: 0.5}), (0.25, 1.0)),
}
EVERY_ALGORITHM = pytest.mark.parametrize("name", ALGORITHMS)
SPECTRAL = ls.SpectralSharding(keep_ratio=0.5)


def batches(number: int = 3) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator)) for _ in range(number)
    ]


class Case:
    """A server, the forms of its clients, and what is sent to one client of each capacity."""

    def __init__(self, name: str, change: Callable[[Any], object] = lambda server: None) -> None:
        algorithm, self.capacities = ALGORITHMS[name]
        self.server: Any = seeded(Net)
        change(self.server)
        half = algorithm.bind(self.server, algorithm.new_state(self.server, 0))
        self.side: ClientSide = half.client_side
        units = {capacity: WorkUnit(i) for i, capacity in enumerate(self.capacities)}
        opened = half.open(Cohort(0, 0, {capacity: (unit,) for capacity, unit in units.items()}))
        self.downloads = {capacity: copy.deepcopy(opened.send(unit)[0]) for capacity, unit in units.items()}
        self.optimizer = sgd(self.server)
        self.forms = Forms(self.server, self.side.take_form, (self.optimizer,))
        self.names = {id(parameter): name for name, parameter in self.server.named_parameters()}

    @contextmanager
    def client(self, capacity: float) -> Iterator[Any]:
        """The server as a client that has what it was sent."""
        download = self.downloads[capacity]
        with self.forms.client(capacity, download.tensors.keys()) as client:
            self.side.load(client, download)
            yield client

    def train(self, client: nn.Module, capacity: float) -> dict[str, Tensor]:
        """Local steps; the state at their end."""
        return trained(self.side, client, self.downloads[capacity], self.optimizer, self.names)

    def by_itself(self, capacity: float) -> dict[str, Tensor]:
        """The same of a module of its own."""
        client = copy.deepcopy(self.server)
        optimizer, names = sgd(client), {id(p): name for name, p in client.named_parameters()}
        self.side.take_form(client, capacity)
        self.side.load(client, self.downloads[capacity])
        return trained(self.side, client, self.downloads[capacity], optimizer, names)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def trained(
    side: ClientSide, client: nn.Module, download: Download, optimizer: torch.optim.Optimizer, names: Any
) -> dict[str, Tensor]:
    local = LocalOptimizer(optimizer, names, client, side.stand_ins(client))
    local.start_client(options_of(optimizer))
    actions = side.start(client, download) or StepActions()
    for x, y in batches():
        x.requires_grad_()  # for backward hooks of the first layer
        if actions.before_forward is not None:
            actions.before_forward()
        loss = F.cross_entropy(client(x), y)
        if actions.after_forward is not None:
            actions.after_forward()
        optimizer.zero_grad()
        loss.backward()
        if actions.before_step is not None:
            actions.before_step(optimizer)
        optimizer.step()
    side.collect(client, download)
    return values(client)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_state(module).items()}


class Same:
    """Equal only to the same object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):x}>"


def own_tensors(module: nn.Module) -> list[Tensor]:
    return list(named_state(module).values())


def structure(module: nn.Module) -> list[Any]:
    """All that a module is, in order, but for the values of its tensors: classes, attributes, layers, hooks, flags."""
    found: list[Any] = []
    for name, part in module.named_modules():
        found.append((name, Same(part), type(part)))
        for attribute, value in vars(part).items():
            found.append((name, attribute, Same(value)))
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            found += [(name, attribute, key, Same(entry)) for key, entry in entries]
    for tensor in own_tensors(module):
        hooks = [list(of or {}) for of in (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)]
        found.append((Same(tensor), tensor.shape, tensor.requires_grad, tensor.grad is None, repr(hooks)))
    return found


def memory(module: nn.Module) -> list[Any]:
    """Where its tensors are, and what they hold."""
    return [
        (tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.detach().cpu().numpy().tobytes())
        for tensor in own_tensors(module)
    ]


def groups_of(optimizer: torch.optim.Optimizer) -> Any:
    options = [{**group, "params": [Same(p) for p in group["params"]]} for group in optimizer.param_groups]
    return options, len(optimizer.state)


def everything(case: Case) -> Any:
    return structure(case.server), memory(case.server), groups_of(case.optimizer), case.server.seen["batches"][:]


def mess_up(client: Any) -> None:
    """Leave a trace wherever there may be one."""
    with torch.no_grad():
        for tensor in own_tensors(client):
            tensor.fill_(9)
    for parameter in client.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: 2 * gradient)
        parameter.grad = torch.ones_like(parameter)
    client.requires_grad_(False)
    client.eval()
    for part in list(client.modules()):
        part.note = "a client's"
        part.register_forward_hook(lambda module, inputs, output: output + 1, prepend=True)
        part.register_buffer("more", torch.ones(1))
        part.__class__ = type("Other", (type(part),), {})
    client.norm.running_mean = torch.ones(8)
    client.middle.register_parameter("extra", nn.Parameter(torch.ones(1)))
    client.first = nn.Identity()
    client.added = nn.Linear(1, 1)
    client.seen["batches"].append(1)
    client.listed.reverse()
    del client.scale


def train(case: Case, client: Any, capacity: float) -> None:
    before = values(client)
    assert not same_state(case.train(client, capacity), before)


def fail(case: Case, client: Any, capacity: float) -> None:
    case.train(client, capacity)
    raise KeyError("the sensor is broken")


def interrupt(case: Case, client: Any, capacity: float) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    client.middle.register_forward_hook(stop)
    case.train(client, capacity)


def ignoring(client: Any) -> Any:
    """Clients whose errors are nobody's."""

    @contextmanager
    def quietly(capacity: float) -> Iterator[Any]:
        with suppress(KeyError, KeyboardInterrupt), client(capacity) as module:
            yield module

    return quietly


TURNS: dict[str, Any] = {
    "nothing": lambda *_: None,
    "training": train,
    "a mess": lambda case, client, capacity: mess_up(client),
    "a mess after training": lambda case, client, capacity: (case.train(client, capacity), mess_up(client)),
    "an error": fail,
    "Ctrl-C": interrupt,
}


@EVERY_ALGORITHM
class TestServer:
    @pytest.mark.sampled(22)
    @pytest.mark.parametrize("turn", TURNS)
    def test_it_comes_back_bit_for_bit(self, name: str, turn: str) -> None:
        case = Case(name)
        before = everything(case)
        for capacity in (*case.capacities, *case.capacities):
            with ignoring(case.client)(capacity) as client:
                assert client is case.server
                assert memory(client) != before[1]  # or the test would show nothing
                TURNS[turn](case, client, capacity)
            assert everything(case) == before
        if turn == "a mess":  # or the test would show nothing
            mess_up(case.server)
            same = [one == two for one, two in zip(everything(case), before, strict=True)]
            assert same == [False, False, True, False]

    def test_its_gradients_may_be_there_before_and_are_not_a_clients(self, name: str) -> None:
        case = Case(name)
        for parameter in case.server.parameters():
            parameter.grad = torch.ones_like(parameter)
        expected = case.by_itself(case.capacities[0])
        for parameter in case.server.parameters():
            parameter.grad = torch.ones_like(parameter)
        with case.client(case.capacities[0]) as client:
            ours = case.train(client, case.capacities[0])
        assert same_state(ours, expected)
        assert all(parameter.grad is None for parameter in case.server.parameters())

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_it_comes_back_if_a_form_cannot_be_taken(self, name: str, error: type[BaseException]) -> None:
        case, fails = Case(name), [True]

        def take_form(module: nn.Module, capacity: float) -> None:
            case.side.take_form(module, capacity)
            module.requires_grad_(False)
            if fails:
                raise error("too large")

        case.forms = Forms(case.server, take_form, (case.optimizer,))
        before, capacity = everything(case), case.capacities[0]
        for _ in range(2):
            with pytest.raises(error, match="too large"), case.client(capacity):
                pass
            assert everything(case) == before
        fails.clear()
        with case.client(capacity) as client:
            assert structure(client) != before[0]
        assert everything(case) == before


@EVERY_ALGORITHM
class TestClients:
    @pytest.mark.sampled(3)
    def test_each_ends_where_a_module_of_its_own_does(self, name: str) -> None:
        case = Case(name)
        expected = {capacity: case.by_itself(capacity) for capacity in case.capacities}
        for turn in ("training", "a mess", "a mess after training", "an error", "Ctrl-C"):
            for capacity in case.capacities:
                with case.client(capacity) as client:
                    assert same_state(case.train(client, capacity), expected[capacity])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(case, "client", ignoring(case.client))
                for capacity in case.capacities:
                    with case.client(capacity) as client:
                        TURNS[turn](case, client, capacity)

    @pytest.mark.sampled(22)
    @pytest.mark.parametrize("turn", TURNS)
    def test_none_finds_what_another_of_its_capacity_left(self, name: str, turn: str) -> None:
        case = Case(name)
        for capacity in case.capacities:
            with ignoring(case.client)(capacity) as client:
                expected = structure(client), memory(client)
                TURNS[turn](case, client, capacity)
            with case.client(capacity) as client:
                assert (structure(client), memory(client)) == expected

    def test_a_form_is_built_once_and_taken_again(self, name: str) -> None:
        case = Case(name)
        built: list[float] = []

        def take_form(module: nn.Module, capacity: float) -> None:
            built.append(capacity)
            case.side.take_form(module, capacity)

        case.forms = Forms(case.server, take_form, (case.optimizer,))
        first: dict[float, Any] = {}
        for _ in range(3):
            for capacity in case.capacities:
                with case.client(capacity) as client:
                    assert structure(client) == first.setdefault(capacity, structure(client))
                    of_its_own = copy.deepcopy(case.server)
                    assert repr(client) == repr(of_its_own)
                    assert list(named_state(client)) == list(named_state(of_its_own))
        assert built == [*case.capacities]

    def test_it_is_what_its_half_makes_of_a_module(self, name: str) -> None:
        case = Case(name)
        for capacity in (*case.capacities, *case.capacities):
            expected = copy.deepcopy(case.server)
            case.side.take_form(expected, capacity)
            with case.forms.client(capacity) as client:
                assert repr(client) == repr(expected)
                ours, theirs = (
                    {name: (type(t), t.shape, t.requires_grad) for name, t in named_state(module).items()}
                    for module in (client, expected)
                )
                assert ours == theirs
                assert list(ours) == list(theirs)
                assert [list(vars(part)) for part in client.modules()] == [
                    list(vars(part)) for part in expected.modules()
                ]

    def test_values_that_are_not_sent_begin_with_the_servers(self, name: str) -> None:
        case = Case(name)
        whose = {id(tensor) for tensor in own_tensors(case.server)}
        for value in (2, 3):
            with torch.no_grad():
                for tensor in own_tensors(case.server):
                    tensor.fill_(value)
            for capacity in case.capacities:
                with case.forms.client(capacity) as client, torch.no_grad():
                    for tensor in own_tensors(client):
                        assert id(tensor) not in whose or bool((tensor == value).all())
                        tensor.fill_(7)
            assert all(bool((tensor == value).all()) for tensor in own_tensors(case.server))

    def test_two_capacities_share_the_memory_of_what_both_have(self, name: str) -> None:
        case = Case(name)
        where: dict[int, set[int]] = {}
        server = {id(tensor): tensor.data_ptr() for tensor in own_tensors(case.server)}
        for capacity in (*case.capacities, *case.capacities):
            with case.client(capacity) as client:
                for tensor in own_tensors(client):
                    if tensor.numel():
                        where.setdefault(id(tensor), set()).add(tensor.data_ptr())
        shared = {key: places for key, places in where.items() if key in server}
        assert all(len(places) == 1 for places in where.values())
        assert all(places.isdisjoint(server.values()) for places in shared.values())
        assert len({place for places in where.values() for place in places}) == len(where)


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward": lambda layer, note: layer.register_forward_hook(note),
    "before forward": lambda layer, note: layer.register_forward_pre_hook(note),
    "with keywords": lambda layer, note: layer.register_forward_hook(note, with_kwargs=True),
    "always": lambda layer, note: layer.register_forward_hook(note, always_call=True),
    "backward": lambda layer, note: layer.register_full_backward_hook(note),
    "before backward": lambda layer, note: layer.register_full_backward_pre_hook(note),
}


@EVERY_ALGORITHM
class TestHooks:
    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("kind", HOOKS)
    def test_those_of_a_layer_act_in_every_form_whenever_they_are_added(self, name: str, kind: str) -> None:
        called = Counter[str]()

        def calls(case: Case, capacity: float) -> Counter[str]:
            called.clear()
            with case.client(capacity) as client:
                case.train(client, capacity)
            return called.copy()

        layers = ["first", "middle"]
        if name == "outputs cut" and "backward" in kind:
            case = Case(name)
            HOOKS[kind](case.server.middle, lambda *_: None)
            with pytest.raises(ValueError, match="'middle' has a hook on its backward pass"):
                calls(case, case.capacities[0])
            layers = ["first"]
        for is_later in (False, True):
            case = Case(name)
            if is_later:
                assert not any(calls(case, capacity) for capacity in case.capacities)
            handles = [
                HOOKS[kind](case.server.get_submodule(layer), lambda *_, layer=layer: called.update([layer]))
                for layer in layers
            ]
            for capacity in (*case.capacities, *case.capacities):
                assert calls(case, capacity) == dict.fromkeys(layers, len(batches())), is_later
            for handle in handles:
                handle.remove()
            assert not any(calls(case, capacity) for capacity in case.capacities)

    def test_they_act_in_the_order_in_which_they_were_added(self, name: str) -> None:
        case, called = Case(name), list[str]()
        middle = case.server.middle
        middle.register_forward_hook(lambda *_: called.append("first"))
        with case.client(case.capacities[0]) as client:
            client(batches()[0][0])
        middle.register_forward_hook(lambda *_: called.append("second"))
        middle.register_forward_hook(lambda *_: called.append("before"), prepend=True)
        for capacity in (*case.capacities, *case.capacities):
            called.clear()
            with case.client(capacity) as client:
                client(batches()[0][0])
            assert called == ["before", "first", "second"]


@pytest.mark.parametrize("when", ["before", "after", "in front, after"])
@pytest.mark.parametrize("name", ["LoRA", "LoRA, alternating"])
def test_a_users_hook_sees_the_output_of_the_adapted_layer(name: str, when: str) -> None:
    seen: list[Tensor] = []

    def see(server: Any, **options: Any) -> None:
        server.middle.register_forward_hook(lambda layer, args, output: seen.append(output), **options)

    case = Case(name, see if when == "before" else lambda server: None)
    capacity, x = case.capacities[0], torch.ones(2, 8)
    with case.client(capacity):
        pass
    if when != "before":
        see(case.server, prepend="in front" in when)
    for _ in range(2):
        with torch.no_grad(), case.client(capacity) as client:
            layer = client.middle
            for factor in (layer.lora_A, layer.lora_B):
                factor.fill_(0.5)
            seen.clear()
            output = layer(x)
            plain = F.linear(x, layer.weight, layer.bias)
            assert len(seen) == 1
            assert torch.equal(seen[0], output)
            assert not torch.allclose(seen[0], plain, atol=0.1)


class Frozen(nn.Module):
    """The gradient of its weight is multiplied by a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line = nn.Linear(2, 4)
        self.register_buffer("mask", torch.tensor([[0.0], [0.0], [1.0], [1.0]]))
        if how == "accumulated":
            self.line.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * self.mask))
        else:
            self.line.weight.register_hook(self.masked if how == "method" else lambda gradient: gradient * self.mask)

    def masked(self, gradient: Tensor) -> Tensor:
        return gradient * self.mask


@pytest.mark.parametrize("how", ["closure", "method", "accumulated"])
def test_gradient_hooks_act_on_clients_and_read_their_buffers(how: str) -> None:
    server = Frozen(how)
    forms = Forms(server, lambda module, capacity: None)
    own = server.mask.expand(4, 2).clone()
    for factor in (3.0, 5.0):
        with forms.client(1.0) as client:
            client.mask.fill_(factor)
            client.line(torch.ones(1, 2)).sum().backward()
            assert torch.equal(client.line.weight.grad, torch.full((4, 2), factor))
    server.line(torch.ones(1, 2)).sum().backward()
    assert torch.equal(server.line.weight.grad, own)


def whole(module: nn.Module, capacity: float) -> None:
    """The form of a client that has all the server has."""


def with_own_biases(module: nn.Module, capacity: float) -> None:
    """The form of a client whose biases are other parameters."""
    for part in module.modules():
        if isinstance(part._parameters.get("bias"), Tensor):
            part.bias = nn.Parameter(torch.full_like(part.bias, capacity))


class TestMemory:
    @pytest.mark.parametrize("take_form", [whole, with_own_biases])
    def test_tied_parameters_stay_tied(self, take_form: Any) -> None:
        server: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        server[1].weight = server[0].weight
        forms, before = Forms(server, take_form), server[0].weight.detach().clone()
        for _ in range(2):
            with forms.client(1.0) as client:
                assert client[0].weight is client[1].weight
                client[0].weight.data.fill_(2.0)
                assert bool((client[1].weight == 2.0).all())
            assert server[0].weight is server[1].weight
            assert torch.equal(server[0].weight, before)

    @EVERY_ALGORITHM
    def test_tied_layers_stay_tied_in_every_algorithm(self, name: str) -> None:
        def tie(server: Any) -> None:
            server.again = server.middle

        case = Case(name, tie)
        before = everything(case)
        for capacity in (*case.capacities, *case.capacities):
            with case.client(capacity) as client:
                assert client.again is client.middle
                assert torch.equal(client.again.weight, client.middle.weight)
            assert everything(case) == before

    @pytest.mark.parametrize("take_form", [whole, with_own_biases])
    def test_tensors_that_share_a_storage_share_it_in_client_memory(self, take_form: Any) -> None:
        server: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
        flat = torch.arange(24.0)
        server[0].weight.data, server[1].weight.data = flat[:12].view(3, 4)[:, :2], flat[6:12].view(3, 2)
        server.register_buffer("view", flat[20:])
        forms = Forms(server, take_form)
        for _ in range(2):
            with forms.client(1.0) as client:
                tensors = [client[0].weight, client[1].weight, client.view]
                assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
                assert tensors[0].untyped_storage().data_ptr() != flat.untyped_storage().data_ptr()
                assert [tensor.storage_offset() for tensor in tensors] == [0, 6, 20]
                assert [tensor.stride() for tensor in tensors] == [(4, 1), (2, 1), (1,)]
                assert torch.equal(tensors[1].detach(), flat[6:12].view(3, 2))
                tensors[0].data[2, 1] = 100.0  # entry 9 of the storage
                assert float(tensors[1].detach()[1, 1]) == 100.0
            assert torch.equal(flat, torch.arange(24.0))

    def test_tensors_that_share_a_storage_do_so_also_if_a_capacity_lacks_one_of_them(self) -> None:
        server: Any = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False))
        flat = torch.arange(6.0)
        for layer in server:
            layer.weight.data = flat.view(3, 2)

        def without_the_second(module: Any, capacity: float) -> None:
            if capacity < 1:
                module[1].weight = nn.Parameter(torch.zeros(3, 2))

        forms = Forms(server, without_the_second)
        for capacity in (0.5, 1.0, 0.5, 1.0):
            with forms.client(capacity) as client:
                assert torch.equal(client[0].weight.detach(), torch.arange(6.0).view(3, 2))
                client[0].weight.data.add_(1.0)
                if capacity == 1.0:
                    assert torch.equal(client[1].weight, client[0].weight)
            assert torch.equal(flat, torch.arange(6.0))

    def test_there_is_one_copy_of_the_server(self) -> None:
        server = nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20), nn.Linear(20, 20))
        forms = Forms(server, with_own_biases)
        for capacity in (0.25, 0.5, 0.25, 0.75):
            with forms.client(capacity):
                pass
        held = sum(memory.untyped_storage().nbytes() for memory in forms._memory.values())
        weights = [server[0].weight, server[1].weight, server[2].weight, *server.buffers()]
        assert held == sum(tensor.untyped_storage().nbytes() for tensor in weights)

    def test_what_is_sent_is_not_copied_first(self) -> None:
        forms = Forms(nn.Linear(2, 2), whole)
        with forms.client(1.0) as client:
            for parameter in client.parameters():
                parameter.data.fill_(7.0)
        with forms.client(1.0, sent=["weight"]) as client:
            assert bool((client.weight == 7.0).all())  # about to be loaded
            assert not bool((client.bias == 7.0).any())

    def test_a_server_of_another_type_has_clients_of_that_type(self) -> None:
        server = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        forms = Forms(server, whole)
        with forms.client(1.0):
            pass
        server.double()
        before = values(server)
        with forms.client(1.0) as client:
            assert same_state(values(client), before)
            assert client[0].weight.dtype is torch.float64
            client[0].weight.data.zero_()
        assert same_state(values(server), before)

    def test_of_a_module_that_is_a_devices_own_replaced_weights_take_none(self) -> None:
        module = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10))
        shapes, size = [p.shape for p in module.parameters()], 20 * 30 * 4
        assert module[0].weight.untyped_storage().nbytes() == size

        def take_form(module: Any, capacity: float) -> None:
            module[0].weight = nn.Parameter(torch.zeros(20, 30)[: round(20 * capacity)])

        forms = Forms(module, take_form, owned=True)
        weight, kept = module[0].weight, module[1].weight
        where = kept.data_ptr()
        for _ in range(2):
            with forms.client(0.5) as client:
                assert client[0].weight.shape == (10, 30)
                assert weight.untyped_storage().nbytes() <= 4
                assert client[1].weight.data_ptr() == where  # there is no server whose values would have to last
                client[1].weight.data.fill_(3.0)
                client[1].note = 1
            assert module[0].weight is weight
            assert [p.shape for p in module.parameters()] == shapes
            assert module[1].weight is kept
            assert not hasattr(module[1], "note")
            assert bool((kept == 3.0).all())
        assert not forms._memory
        plain = Forms(nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)), take_form)  # control
        with plain.client(0.5):
            assert plain.module[0].weight.shape == (10, 30)
        assert plain.module[0].weight.untyped_storage().nbytes() == size

    @EVERY_ALGORITHM
    def test_clients_of_a_devices_own_module_end_where_others_do(self, name: str) -> None:
        case = Case(name)
        expected = {capacity: case.by_itself(capacity) for capacity in case.capacities}
        case.forms = Forms(case.server, case.side.take_form, (case.optimizer,), owned=True)
        for _ in range(2):
            for capacity in case.capacities:
                with case.client(capacity) as client:
                    ours = case.train(client, capacity)
                assert list(ours) == list(expected[capacity])
                for own, tensor in ours.items():
                    is_counter = own.endswith("num_batches_tracked")
                    assert is_counter or torch.equal(tensor, expected[capacity][own]), own


@pytest.mark.usefixtures("interruptible")
class TestTurns:
    def test_a_module_is_one_client_at_a_time(self) -> None:
        forms = Forms(nn.Linear(1, 1), whole)
        with forms.client(1.0):
            with pytest.raises(AssertionError, match="one client at a time"), forms.client(1.0):
                pass
            assert forms.kept is not None
        assert forms.kept is None

    def test_giving_back_twice_does_no_harm(self) -> None:
        server = nn.Linear(1, 1)
        forms, weight = Forms(server, whole), server.weight.detach().clone()
        forms.take(1.0)
        server.weight.data.fill_(3.0)
        forms.give_back()
        server.weight.data.copy_(weight + 1)
        forms.give_back()
        assert torch.equal(server.weight, weight + 1)

    def test_attributes_and_modes_that_the_server_gets_between_turns_are_those_of_clients(self) -> None:
        server: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        forms = Forms(server, with_own_biases)
        with forms.client(0.5):
            pass
        server.steps, server[0].kept = 3, [1]
        server[0].eval()
        with forms.client(0.5) as client:
            assert (client.steps, client[0].kept, client[0].training) == (3, [1], False)
            client.steps += 1
            client[0].kept.append(2)
            assert bool((client[0].bias == 0.5).all())
        assert (server.steps, server[0].kept) == (3, [1])

    @pytest.mark.parametrize("take_form", [whole, with_own_biases])
    @pytest.mark.parametrize(
        "change",
        [
            lambda server: setattr(server[1], "running_mean", torch.full((2,), 3.0)),
            lambda server: setattr(server[0], "weight", nn.Parameter(torch.full((2, 2), 3.0))),
            lambda server: server.__setitem__(0, nn.Linear(2, 2)),
            lambda server: server[0].register_buffer("count", torch.zeros(1)),
            lambda server: server.append(nn.Linear(2, 2)),
        ],
        ids=["buffer", "parameter", "layer", "new buffer", "new layer"],
    )
    def test_tensors_that_the_server_gets_between_turns_are_not_written_by_clients(
        self, change: Any, take_form: Any
    ) -> None:
        server: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        forms = Forms(server, take_form)
        with forms.client(0.5):
            pass
        change(server)
        before = values(server)
        for _ in range(2):
            with forms.client(0.5) as client:
                now = values(client)
                assert now.keys() == before.keys()
                assert all(torch.equal(now[name], before[name]) for name in now if not name.endswith("bias"))
                with torch.no_grad():
                    for tensor in own_tensors(client):
                        tensor.fill_(9)
            assert same_state(values(server), before)

    @pytest.mark.parametrize("how_often", [1, 2])
    def test_ctrl_c_waits_until_a_form_is_built_and_a_second_one_ends_that(self, how_often: int) -> None:
        built: list[str] = []

        def take_form(module: Any, capacity: float) -> None:
            with_own_biases(module, capacity)
            for _ in range(how_often):
                signal.raise_signal(signal.SIGINT)
            built.append("to the end")

        server = nn.Linear(2, 2)
        forms, before = Forms(server, take_form), structure(server)
        with pytest.raises(KeyboardInterrupt), forms.client(0.5):
            built.append("a client trained")
        assert built == (["to the end"] if how_often == 1 else [])
        assert structure(server) == before
        assert forms.kept is None

    def test_ctrl_c_while_the_server_comes_back_waits_until_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        restore = KeptState.restore

        def interrupted(kept: KeptState) -> None:
            signal.raise_signal(signal.SIGINT)
            restore(kept)

        monkeypatch.setattr(KeptState, "restore", interrupted)
        server = nn.Linear(2, 2)
        forms, before, values_before = Forms(server, with_own_biases), structure(server), values(server)
        with pytest.raises(KeyboardInterrupt), forms.client(0.5) as client:
            client.weight.data.fill_(3.0)
        assert structure(server) == before
        assert same_state(values(server), values_before)

    def test_an_own_handler_of_ctrl_c_is_called_at_the_end_and_is_there_again(self) -> None:
        events: list[str] = []
        mine = signal.signal(signal.SIGINT, lambda signum, frame: events.append("interrupted"))
        try:
            handler = signal.getsignal(signal.SIGINT)
            with postponing_interrupts():
                signal.raise_signal(signal.SIGINT)
                events.append("the end")
            assert events == ["the end", "interrupted"]
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, mine)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.SpectralSharding(exclude=["net.3"])], ids=["dense", "sharded"])
@pytest.mark.parametrize("change", [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_weights_that_a_hook_recomputes_are_trained_after_a_forward_pass(
    change: Any, algorithm: Any, lit: Any, data: Any, fit: Fit
) -> None:
    lit.net.insert(3, change(seeded(nn.Linear, 12, 12)))
    lit(torch.zeros(1, 6))  # leaves a weight with a gradient function
    before = lit.net[3].weight.detach().clone()
    after = fit(lit, data, algorithm=algorithm).module.net[3]
    after(torch.zeros(1, 12))
    assert not torch.equal(after.weight, before)
    assert torch.equal(after.weight == 0, before == 0)  # pruned entries stay pruned


@pytest.mark.filterwarnings("ignore:.*clients change `features`, which:lightning_spectral.SpectralWarning")
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), SPECTRAL, ls.WidthSharding(keep_ratio=0.5), ls.Zampling(2)])
def test_clients_read_their_own_features_and_weights(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    differ: list[float] = []

    class Lit(lit_mlp):  # type: ignore[misc]
        example_input_array = torch.zeros(2, 6)

        def __init__(self) -> None:
            super().__init__()
            self.features: dict[str, Tensor] = {}
            self.layers = [self.net[2]]
            self.net[2].register_forward_hook(lambda *args: self.features.__setitem__("x", args[-1]))
            self.size = lambda: self.net[2].weight.detach().norm()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            assert len(self.features["x"]) == len(batch[0])
            own = self.net[2].weight.detach().norm()
            differ.extend([float(own - self.size()), float(own - self.layers[0].weight.detach().norm())])
            return loss + 0.01 * self.features["x"].square().mean()

    fit(seeded(Lit), data, algorithm=algorithm, max_epochs=2)
    assert set(differ) == {0.0}


def test_a_function_that_holds_a_parameter_which_clients_do_not_have_is_refused(lit: Any, data: Any, fit: Fit) -> None:
    weight = lit.net[2].weight
    lit.net[2].register_forward_hook(lambda layer, args, output: output + 0 * weight.sum())
    assert fit(copy.deepcopy(lit), data).history.rows
    with pytest.raises(ValueError, match=r"uses parameters that it does not hold \(net\.2\.weight\).*`exclude`"):
        fit(lit, data, algorithm=SPECTRAL)


@pytest.mark.parametrize(
    "make", [sgd, lambda net: torch.optim.Adam(net.parameters()), lambda net: torch.optim.Adagrad(net.parameters())]
)
def test_a_later_phase_begins_with_the_optimizer_of_the_first(make: Any) -> None:
    net = nn.Linear(3, 2)
    optimizer = make(net)
    local = LocalOptimizer(optimizer, {id(p): name for name, p in net.named_parameters()}, net)
    local.start_client([{**options_of(optimizer)[0], "lr": 0.3}])
    begin, put_back = copy.deepcopy(net.state_dict()), local.as_now()
    x, y = torch.randn(4, 3), torch.randn(4, 2)

    def phase() -> dict[str, Tensor]:
        net.load_state_dict(begin)
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(net(x), y).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5  # as a user's step may
        return copy.deepcopy(net.state_dict())

    first = phase()
    assert not same_state(phase(), first), "otherwise nothing has to be put back"
    for _ in range(2):
        put_back()
        assert same_state(phase(), first)
