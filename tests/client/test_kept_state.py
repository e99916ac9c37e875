"""What a client changes on a module is put back, whatever it is kept in; and what it is, is named."""

import argparse
import copy
import itertools
import random
import threading
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pluggy
import pytest
import torch
import torchmetrics
from federation import HARDLY_MOVED, Fit, same_state, seeded
from lightning.fabric.utilities.data import AttributeDict
from torch import Tensor, nn

import lightning_spectral as ls
from lightning_spectral.client.kept_state import KeptState, changed_attributes, trying
from lightning_spectral.nn import plan_layers
from lightning_spectral.protocol.exchange import named_state


class Plain:
    """An object of a user's own."""

    def __init__(self) -> None:
        self.count, self.seen = 0, [0]


class Slotted:
    """Likewise, without a dictionary."""

    __slots__ = ("__private", "count", "later", "seen")

    def __init__(self) -> None:
        self.count, self.seen, self.__private = 0, [0], 0

    def __repr__(self) -> str:
        return repr((self.count, self.seen, self.__private, getattr(self, "later", None)))

    def hide(self) -> None:
        self.__private += 1


class Both(Slotted):
    """With slots and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.more = [0]


@dataclass
class Record:
    """A user's dataclass."""

    count: int = 0
    seen: list[int] = field(default_factory=list)


class Pair(NamedTuple):
    """A tuple of a user's own."""

    first: list[int]
    second: int


class Journal(list[int]):
    """A list with an attribute."""

    total = 0


def frame() -> Any:
    """A data frame, where pandas is installed."""
    return pytest.importorskip("pandas").DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}, index=[3, 4])


def unregistered() -> list[nn.Module]:
    """A layer that the module holds in a list."""
    return [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]


def fill(tensor: Tensor, value: float = 5.0) -> None:
    tensor.detach().fill_(value)


def put(target: Any, **attributes: Any) -> None:
    """Set attributes."""
    for name, value in attributes.items():
        setattr(target, name, value)


def tensors_of(value: Any) -> str:
    return repr({name: tensor.tolist() for name, tensor in value[0].state_dict().items()})


def cyclic() -> SimpleNamespace:
    """It refers to itself."""
    value = SimpleNamespace(count=0, seen=[0])
    value.own = value.seen_again = [value]
    return value


def times(number: int, act: Callable[[Any], object]) -> Callable[[Any], None]:
    def acts(value: Any) -> None:
        for _ in range(number):
            act(value)

    return acts


Change = Callable[[Any], object]
# What is kept, how a client changes it, and what is compared
KINDS: dict[str, tuple[Callable[[], Any], Change, Callable[[Any], Any]]] = {
    "list, longer": (lambda: [1], lambda v: v.append(2), repr),
    "list, from empty": (list, lambda v: v.append(2), repr),
    "list, other order": (lambda: [1, 2], lambda v: v.reverse(), repr),
    "list within a list": (lambda: [[1], 2], lambda v: v[0].append(2), repr),
    "list with an attribute": (Journal, lambda v: put(v, total=v.total + 1), lambda v: (repr(v), v.total)),
    "dict, another entry": (lambda: {"a": 1}, lambda v: v.update(b=2), repr),
    "dict, entry gone": (lambda: {"a": 1, "b": 2}, lambda v: v.pop("a"), repr),
    "dict, other value": (lambda: {"a": 1}, lambda v: v.update(a=2), repr),
    "dict, from empty": (dict, lambda v: v.update(a=2), repr),
    "dict, other order": (lambda: {"a": 1, "b": 1}, lambda v: v.update(a=v.pop("a")), repr),
    "dict with a list": (lambda: {"a": [1]}, lambda v: v["a"].clear(), repr),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda v: v.move_to_end("a"), repr),
    "defaultdict": (lambda: defaultdict(list, a=[1]), lambda v: v["b"].append(1), repr),
    "Counter": (lambda: Counter("aab"), lambda v: v.update("bc"), repr),
    "hyperparameters": (lambda: AttributeDict(a=1), lambda v: put(v, a=2), repr),
    "UserDict": (lambda: UserDict(a=[1]), lambda v: v.update(b=2), repr),
    "UserList": (lambda: UserList([1]), lambda v: v.append(2), repr),
    "set": (lambda: {1}, lambda v: v.add(2), repr),
    "set, from empty": (set, lambda v: v.add(2), repr),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3), repr),
    "deque, within": (lambda: deque([[1]]), lambda v: v[0].append(3), repr),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c"), repr),
    "list in a tuple": (lambda: ([1], 2), lambda v: v[0].append(2), repr),
    "list in a named tuple": (lambda: Pair([1], 2), lambda v: v.first.append(2), repr),
    "SimpleNamespace": (lambda: SimpleNamespace(a=1), lambda v: put(v, a=2, b=3), repr),
    "SimpleNamespace, deleted": (lambda: SimpleNamespace(a=1), lambda v: delattr(v, "a"), repr),
    "cycle": (cyclic, lambda v: (put(v, count=2), v.own[0].seen.append(1)), repr),
    "Namespace": (lambda: argparse.Namespace(a=1, b=[2]), lambda v: (put(v, a=2), v.b.append(3)), repr),
    "dataclass": (Record, lambda v: put(v, count=v.count + 1), repr),
    "dataclass, within": (Record, lambda v: v.seen.append(1), repr),
    "object": (Plain, lambda v: put(v, count=v.count + 1, new=1), lambda v: repr(vars(v))),
    "object, other class": (Plain, lambda v: put(v, __class__=SimpleClass), type),
    "slots": (Slotted, lambda v: put(v, count=v.count + 1), repr),
    "slots, not yet set": (Slotted, lambda v: put(v, later=1), repr),
    "slots, private": (Slotted, lambda v: v.hide(), repr),
    "slots and a dictionary": (Both, lambda v: (put(v, count=1), v.more.append(1)), lambda v: repr((v, v.more))),
    "array": (lambda: np.zeros(2), lambda v: v.fill(1), repr),
    "array of objects": (lambda: np.array([None, "a"]), lambda v: v.__setitem__(0, "b"), repr),
    "frame, cell": (frame, lambda v: v.__setitem__("a", v["a"] + 1), repr),
    "frame, column": (frame, lambda v: v.insert(0, "c", 1), repr),
    "frame, names": (frame, lambda v: put(v, columns=["c", "d"]), repr),
    "series": (lambda: frame()["a"], lambda v: v.__setitem__(3, 9.0), repr),
    "tensor": (lambda: torch.zeros(2), fill, repr),
    "tensor in a list": (lambda: [torch.zeros(2)], lambda v: fill(v[0]), repr),
    "tensor in a dict": (lambda: {"a": torch.zeros(2)}, lambda v: fill(v["a"]), repr),
    "tensor in an object": (lambda: SimpleNamespace(a=torch.zeros(2)), lambda v: fill(v.a), repr),
    "tensor, of integers": (lambda: torch.zeros((), dtype=torch.long), lambda v: v.add_(1), repr),
    "tensor, transposed": (lambda: torch.zeros(2, 3).T, fill, repr),
    "tensor, other data": (lambda: torch.zeros(2), lambda v: put(v, data=torch.ones(2)), repr),
    "tensor, other shape": (lambda: torch.zeros(2), lambda v: put(v, data=torch.ones(3)), repr),
    "layer in a list": (unregistered, lambda v: v[0].requires_grad_(False)[0].weight.fill_(2.0), tensors_of),
    "layer in a list, buffers": (unregistered, lambda v: v[0](torch.randn(4, 2)), tensors_of),
    "layer in a list, attribute": (unregistered, lambda v: put(v[0], steps=1), lambda v: hasattr(v[0], "steps")),
    "layer in a list, mode": (unregistered, lambda v: v[0].eval(), lambda v: v[0][1].training),
    "layer in a list, hook": (
        unregistered,
        lambda v: v[0][0].register_forward_hook(print),
        lambda v: len(v[0][0]._forward_hooks),
    ),
}
# Of one kind, but not the module's alone, or of a library that says itself what changes
NOT_NAMED = ("layer in a list",)
UNCHANGED = {"list with an attribute", "object, other class"}


class SimpleClass(Plain):
    """What an object becomes."""


def module_with(value: Any) -> Any:
    module: Any = nn.Sequential(nn.Linear(1, 1))
    module[0].kept = value
    return module


@pytest.mark.parametrize("kind", KINDS)
class TestKinds:
    @pytest.mark.parametrize("holds_another", [False, True], ids=["itself", "another in its place"])
    def test_its_content_is_put_back_and_it_stays_the_same_object(self, kind: str, holds_another: bool) -> None:
        make, change, look = KINDS[kind]
        module = module_with(make())
        value = module[0].kept
        before = look(value)
        for _ in range(2):  # clients
            kept = KeptState(module)
            change(value)
            assert look(value) != before  # or the test would show nothing
            if holds_another:
                module[0].kept = make()
            kept.restore()
            assert module[0].kept is value
            assert look(value) == before

    def test_what_the_server_changed_since_is_kept_as_well(self, kind: str) -> None:
        make, change, look = KINDS[kind]
        module = module_with(make())
        kept = KeptState(module)
        change(module[0].kept)
        kept.restore()
        change(module[0].kept)  # this time at the server
        by_server = look(module[0].kept)
        for act in (lambda value: put(module[0], kept=make()), change):  # clients
            if not kept.renewed():
                kept = KeptState(module)
            with suppress(ValueError, KeyError, AttributeError):  # not everything can be done twice
                act(module[0].kept)
            kept.restore()
            assert look(module[0].kept) == by_server

    def test_a_change_is_named(self, kind: str) -> None:
        make, change, _ = KINDS[kind]
        module = module_with(make())
        changed = changed_attributes(module)
        assert changed() == ()
        change(module[0].kept)
        is_named = not kind.startswith(NOT_NAMED) and kind not in UNCHANGED
        assert changed() == (("0.kept",) if is_named else ())

    def test_another_object_in_its_place_is_named_if_it_differs(self, kind: str) -> None:
        module = module_with(KINDS[kind][0]())
        changed = changed_attributes(module)
        module[0].kept = copy.deepcopy(module[0].kept)
        assert changed() == ()
        module[0].kept = "something else"
        assert changed() == ("0.kept",)


def test_parameters_in_an_attribute_are_parameters() -> None:
    changed = changed_attributes(recurrent := nn.GRU(1, 1))  # which keeps its weights in a list, too
    with torch.no_grad():
        recurrent.weight_hh_l0.add_(1.0)
    assert changed() == ()


def test_content_of_slots_that_the_server_bound_since_is_kept() -> None:
    module = module_with(Slotted())
    kept = KeptState(module)
    kept.restore()
    module[0].kept.seen = [7]
    if not kept.renewed():
        kept = KeptState(module)
    module[0].kept.seen.append(8)
    kept.restore()
    assert module[0].kept.seen == [7]


READ_ONLY = np.zeros(2)
READ_ONLY.flags.writeable = False
with torch.inference_mode():
    INFERRED = torch.zeros(2)


@pytest.mark.parametrize(
    "value",
    [
        (1, "a", b"a", None, 2.0, 1j, torch.float32, torch.device("cpu"), torch.Size([2]), slice(1)),
        torch.zeros(1).expand(3),
        torch.zeros(2, device="meta"),
        torch.eye(2).to_sparse(),
        INFERRED,
        2 * torch.ones(2, requires_grad=True),
        READ_ONLY,
        np.broadcast_to(np.zeros(1), (3,)),
        frozenset({1}),
        range(3),
        print,
        Plain,
        random,
        threading.Lock(),
        random.SystemRandom(),
        itertools.count(),
        (i for i in range(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_nobody_can_change_in_place_or_put_back_is_left_alone(value: Any) -> None:
    module = module_with([value])
    changed = changed_attributes(module)
    kept = KeptState(module)
    assert kept.renewed()
    kept.restore()
    assert module[0].kept[0] is value
    assert changed() == ()


class TestAttributes:
    def test_they_are_bound_again_new_ones_removed_and_deleted_ones_return(self) -> None:
        module = module_with("own")
        module.steps, module.name = 0, "model"
        kept, before = KeptState(module), [list(vars(part)) for part in (module, module[0])]
        module.steps += 1
        module.new = module[0].new = module[0].kept = object()
        del module.name
        module[0].training = False
        kept.restore()
        assert (module.steps, module.name, module[0].kept) == (0, "model", "own")
        assert not hasattr(module, "new")
        assert not hasattr(module[0], "new")
        assert module[0].training
        assert [list(vars(part)) for part in (module, module[0])] == before

    def test_parts_that_share_an_object_still_share_it(self) -> None:
        module: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        module[0].seen = module[1].seen = module.seen = []
        kept = KeptState(module)
        module[0].seen.append(1)
        module[1].seen = [2]
        kept.restore()
        assert module[0].seen is module[1].seen is module.seen
        assert module.seen == []

    def test_further_objects_are_kept_as_well(self) -> None:
        module, other = nn.Linear(1, 1), Plain()
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        kept = KeptState(module, optimizer, other)
        module(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"], optimizer.steps = 0.1, 1
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        other.seen.append(1)
        kept.restore()
        assert not optimizer.state
        assert [group["lr"] for group in optimizer.param_groups] == [0.5]
        assert not hasattr(optimizer, "steps")
        assert other.seen == [0]

    def test_layers_parameters_buffers_and_hooks_are_those_that_were_there(self) -> None:
        module: Any = nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.BatchNorm1d(2)))
        called: list[str] = []
        module.a.register_forward_hook(lambda *_: called.append("first"))
        module.a.register_forward_hook(lambda *_: called.append("second"))
        parts, tensors = dict(module.named_modules()), dict(module.named_parameters()) | dict(module.named_buffers())
        kept = KeptState(module)
        module.a = nn.Linear(2, 2)
        module.c = nn.Linear(2, 2)
        module.b.register_buffer("more", torch.zeros(1))
        module.b.running_mean = torch.ones(2)
        del module.b.bias
        parts["a"].weight = nn.Parameter(torch.zeros(2, 2))
        parts["a"].register_forward_hook(lambda *_: called.append("a client's"), prepend=True)
        parts["a"]._forward_hooks.popitem()
        kept.restore()
        assert dict(module.named_modules()) == parts
        now = dict(module.named_parameters()) | dict(module.named_buffers())
        assert {name: id(tensor) for name, tensor in now.items()} == {n: id(t) for n, t in tensors.items()}
        assert list(now) == list(tensors)
        module(torch.zeros(2, 2))
        assert called == ["first", "second"]

    def test_values_of_parameters_and_buffers_are_not_its_business(self) -> None:
        module = nn.BatchNorm1d(2)
        kept = KeptState(module)
        for tensor in named_state(module).values():
            tensor.data.fill_(3)
        kept.restore()
        assert [tensor.tolist() for tensor in named_state(module).values()] == [[3, 3]] * 4 + [3]

    def test_gradients_are_dropped_and_what_needs_one_is_as_it_was(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        module[0].bias.requires_grad_(False)
        flags = [p.requires_grad for p in module.parameters()]
        kept = KeptState(module)
        module(torch.ones(1, 2)).sum().backward()
        module.requires_grad_(False)
        module[0].bias.requires_grad_(True).grad = torch.ones(2)
        kept.restore()
        assert [p.requires_grad for p in module.parameters()] == flags
        assert all(p.grad is None for p in module.parameters())

    def test_a_module_in_a_list_has_its_flags_and_no_gradients_of_a_client(self) -> None:
        module = module_with([nn.Linear(1, 1)])
        (layer,) = module[0].kept
        kept = KeptState(module)
        layer(torch.ones(1, 1)).sum().backward()
        layer.requires_grad_(False)
        kept.restore()
        assert layer.weight.requires_grad
        assert layer.weight.grad is None

    def test_flags_that_the_server_set_since_are_kept(self) -> None:
        module = nn.Linear(1, 1)
        kept = KeptState(module)
        kept.restore()
        module.weight.requires_grad_(False)
        assert kept.renewed()
        module.weight.requires_grad_(True)
        kept.restore()
        assert not module.weight.requires_grad


@pytest.mark.parametrize(
    "change",
    [
        lambda module: put(module[0], kept=[2]),
        lambda module: put(module[0], new=1),
        lambda module: module[0].kept.append(2),
        lambda module: put(module[0], __class__=nn.Identity),
        lambda module: module[0].register_forward_hook(print),
        lambda module: module.append(nn.Linear(1, 1)),
        lambda module: put(module[0], bias=nn.Parameter(torch.zeros(1))),
        lambda module: delattr(module[0], "kept"),
    ],
    ids=["rebound", "new", "longer", "class", "hook", "layer", "parameter", "deleted"],
)
def test_a_state_with_other_objects_is_not_renewed(change: Change) -> None:
    module = module_with([1])
    kept = KeptState(module)
    assert kept.renewed()
    change(module)
    assert not kept.renewed()


class TestShared:
    def test_what_lies_outside_of_the_module_is_not_put_back(self) -> None:
        seen: list[int] = []
        module = module_with(lambda: seen.append(1))
        module.register_forward_hook(lambda *_: seen.append(2))
        KIND_OF_A_USER.count = 0
        module.kind = KIND_OF_A_USER
        kept = KeptState(module)
        module[0].kept()
        module(torch.ones(1, 1))
        module.kind.count += 1
        kept.restore()
        assert (seen, KIND_OF_A_USER.count) == ([1, 2], 1)

    @pytest.mark.parametrize("name", ["_trainer", "_fabric"])
    def test_the_trainer_is_not_searched(self, name: str) -> None:
        module = module_with(None)
        trainer = SimpleNamespace(seen=[], model=module)
        setattr(module, name, trainer)
        kept = KeptState(module)
        trainer.seen.append(1)
        setattr(module, name, None)
        kept.restore()
        assert trainer.seen == [1]
        assert getattr(module, name) is trainer

    def test_entries_of_a_vocabulary_are_its_own_but_it_has_the_same_ones(self) -> None:
        words = {str(i): [i] for i in range(20_000)}
        kept = KeptState(module_with(words))
        words["new"], words["0"] = [0], [1]
        words["1"].append(2)
        kept.restore()
        assert len(words) == 20_000
        assert words["0"] == [0]
        assert words["1"] == [1, 2]


@pytest.mark.parametrize("value", [torch.zeros(8, 8), np.zeros((8, 8))], ids=["tensor", "array"])
def test_what_is_too_large_is_not_put_back_but_named(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_with({"replayed": value, "small": torch.zeros(2)})
    monkeypatch.setattr("lightning_spectral.client.kept_state.LARGE_BYTES", 100)
    kept, changed = KeptState(module), changed_attributes(module)
    for array in module[0].kept.values():
        array += 1
    kept.restore()
    assert float(value.sum()) == 64
    assert module[0].kept["small"].tolist() == [0.0, 0.0]
    assert kept.not_kept() == ("0.kept['replayed']",)
    assert changed() == ("0.kept",)


class KIND_OF_A_USER:
    """What its class counts, it counts for all."""

    count = 0


class OwnRandom(random.Random):
    """A generator whose methods hold the state, as Python's documentation says."""

    state = 3

    def seed(self, a: Any = None, version: int = 2) -> None:
        self.state = int(a or 0) % 2**61

    def random(self) -> float:
        self.state = (48_271 * self.state + 11) % (2**31 - 1)
        return self.state / (2**31 - 1)

    def getstate(self) -> Any:
        return self.state

    def setstate(self, state: Any) -> None:
        self.state = state


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "random": (lambda: random.Random(3), lambda g: [g.random() for _ in range(3)]),
    "random, another": (lambda: OwnRandom(3), lambda g: [g.random() for _ in range(3)]),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random(3).tolist()),
    "numpy, another": (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.random(3).tolist()),
    "numpy, old": (lambda: np.random.RandomState(3), lambda g: g.rand(3).tolist()),
    "torch": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda generator: generator,
    "list": lambda generator: [generator],
    "deque": lambda generator: deque([generator]),
    "object": lambda generator: SimpleNamespace(own=generator),
    "slots": lambda generator: slotted(generator),
}


def slotted(value: Any) -> Slotted:
    holder = Slotted()
    holder.count = value
    return holder


@pytest.mark.parametrize("kind", GENERATORS)
class TestGenerators:
    def test_the_server_goes_on_where_it_was(self, kind: str) -> None:
        make, draw = GENERATORS[kind]
        module = module_with(make())
        draw(module[0].kept)  # at the server
        expected = make()
        draw(expected)
        for _ in range(3):  # clients, each with a seed or without
            kept = KeptState(module)
            kept.seed(0, (1,))
            assert draw(module[0].kept) != draw(copy.deepcopy(expected))
            kept.restore()
            unseeded = KeptState(module)
            assert draw(module[0].kept) == draw(copy.deepcopy(expected))
            unseeded.restore()
        assert draw(module[0].kept) == draw(expected)

    def test_a_client_draws_by_the_seed_its_ids_and_the_name(self, kind: str) -> None:
        make, draw = GENERATORS[kind]

        def drawn(seed: int, *ids: int, name: str = "kept", before: int = 0) -> Any:
            module = nn.Sequential(nn.Linear(1, 1))
            setattr(module[0], name, make())
            for _ in range(before):
                draw(getattr(module[0], name))
            KeptState(module).seed(seed, ids)
            return draw(getattr(module[0], name))

        expected = drawn(0, 1, 2)
        assert drawn(0, 1, 2) == drawn(0, 1, 2, before=2) == expected
        others = [drawn(1, 1, 2), drawn(0, 1, 3), drawn(0, 2, 2), drawn(0, 1, 2, name="other")]
        assert len({str(numbers) for numbers in [expected, *others]}) == 5

    @pytest.mark.parametrize("holder", HOLDERS)
    def test_no_two_draw_the_same_numbers_wherever_they_are_kept(self, kind: str, holder: str) -> None:
        make, draw = GENERATORS[kind]
        module: Any = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        generators = [make(), make()]
        for layer, generator in zip(module, generators, strict=True):
            layer.kept = HOLDERS[holder](generator)
        KeptState(module).seed(0, (1,))
        assert draw(generators[0]) != draw(generators[1])

    def test_it_changes_nothing_that_is_named(self, kind: str) -> None:
        make, draw = GENERATORS[kind]
        module = module_with(make())
        changed = changed_attributes(module)
        draw(module[0].kept)
        assert changed() == ()


class TestTrying:
    def test_a_pass_in_another_mode_leaves_nothing(self) -> None:
        module: Any = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        module.seen = []
        module.register_forward_hook(lambda part, inputs, output: part.seen.append(output))
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        where = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
        module(torch.randn(4, 2)).sum().backward()
        assert not same_state(module.state_dict(), before)  # or the test would show nothing
        module.load_state_dict(before)
        module.zero_grad()
        module.seen.clear()
        with trying(module):
            module.train()(torch.randn(4, 2)).sum().backward()
            module.eval()
            module[0] = nn.Linear(2, 2)
        assert module.training
        assert module[1].training
        assert module.seen == []
        assert same_state(module.state_dict(), before)
        assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == where
        assert all(p.grad is None for p in module.parameters())

    def test_also_after_an_error(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(3, 1))
        module.register_forward_pre_hook(lambda *_: put(module, training=False))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), trying(module):
            module(torch.randn(4, 2))
        assert module.training
        assert int(module[0].num_batches_tracked or 0) == 0


def test_own_tensors_are_each_there_once() -> None:
    module: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    module[1].weight = module[0].weight
    expected = [module[0].weight, module[1].bias, *module[2].buffers()]
    assert [id(tensor) for tensor in named_state(module).values()] == [id(tensor) for tensor in expected]


class TestNamed:
    def test_attributes_of_all_parts_that_are_other_new_or_gone(self) -> None:
        module = module_with(0)
        module.steps, module.gone = 0, 1
        changed = changed_attributes(module)
        module.steps += 1
        module[0].kept += 1
        module.new = 1
        del module.gone
        assert changed() == ("0.kept", "gone", "new", "steps")

    def test_but_for_those_that_are_excepted(self) -> None:
        module = module_with(0)
        changed = changed_attributes(module, {"0.kept"})
        module[0].kept = 1
        module.steps = 1
        assert changed() == ("steps",)

    @pytest.mark.parametrize(
        "change",
        [
            lambda module: fill(module[0].weight),
            lambda module: module.eval(),
            lambda module: module.requires_grad_(False),
            lambda module: module[0].register_forward_hook(print),
            lambda module: module(torch.ones(1, 1)).sum().backward(),
            lambda module: put(module, log=print, log_dict=print, optimizers=print),
            lambda module: put(module, _trainer=object()),
            lambda module: module.metric.update(3.0),
            lambda module: module[0].metrics.update(3.0),
            lambda module: put(module, metric=torchmetrics.MeanMetric()),
            lambda module: put(module, same=float("nan")),
            lambda module: put(module, kept_again=threading.Lock()),
        ],
    )
    def test_but_not_what_torch_and_lightning_keep_nor_what_is_the_same(self, change: Change) -> None:
        module = module_with(0)
        module.metric, module.same = torchmetrics.MeanMetric(), float("nan")
        module[0].metrics = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric()})
        changed = changed_attributes(module)
        change(module)
        assert changed() == ()

    @pytest.mark.parametrize("was_used", [False, True], ids=["first", "later"])
    @pytest.mark.parametrize("value", [{}, [], None], ids=["dict", "list", "attribute"])
    def test_nor_the_features_that_a_hook_keeps_of_each_pass(self, value: Any, was_used: bool) -> None:
        module = module_with(copy.deepcopy(value))

        def keep(part: nn.Module, inputs: Any, output: Tensor) -> None:
            if isinstance(value, dict):
                module[0].kept["x"] = output
            elif isinstance(value, list):
                module[0].kept[:] = [output]
            else:
                module[0].kept = output

        module.register_forward_hook(keep)
        if was_used:
            module(torch.ones(1, 1))
        changed = changed_attributes(module)
        module(2 * torch.ones(1, 1))
        assert changed() == ()


def test_objects_of_installed_packages_are_left_alone_unless_the_module_is_of_the_same() -> None:
    """They may write files, or count what was sent, as a logger's run does."""

    class OfPluggy(nn.Linear):
        __module__ = "pluggy.models"

    for kind, is_put_back in ((nn.Linear, False), (OfPluggy, True)):
        module = kind(1, 1)
        module.manager = pluggy.PluginManager("any")
        kept = KeptState(module)
        module.manager.num_sent = 1
        kept.restore()
        assert hasattr(module.manager, "num_sent") is not is_put_back


SPECTRAL = ls.SpectralSharding(layers=ls.LayerChoices(keep_first_and_last_dense=False))


@pytest.mark.parametrize("add", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_layer_with_a_gradient_hook_stays_dense(add: str, parameter: str) -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    getattr(module[1].get_parameter(parameter), add)(lambda _: None)
    reasons = [layer.reason for layer in plan_layers(module).layers]
    assert reasons == ["first layer", f"its `{parameter}` has a gradient hook", "affine", "last layer"]


@pytest.mark.filterwarnings(HARDLY_MOVED)
@pytest.mark.parametrize("algorithm", [ls.FedAvg(), ls.Scaffold(), SPECTRAL, ls.Zampling(2)])
def test_rows_that_a_hook_freezes_do_not_move(algorithm: Any, lit_mlp: Any, data: Any, fit: Fit) -> None:
    module = lit_mlp(momentum=0.0)
    start = module.net[2].weight.detach().clone()
    module.net[2].weight.register_hook(lambda gradient: gradient * (torch.arange(12) % 2)[:, None])
    weight = fit(module, data, algorithm=algorithm).module.net[2].weight
    assert torch.equal(weight[::2], start[::2])
    assert not torch.equal(weight[1::2], start[1::2])


def test_a_hook_that_changes_nothing_changes_no_bit(lit_mlp: Any, data: Any, fit: Fit) -> None:
    plain, hooked = seeded(lit_mlp), seeded(lit_mlp)
    hooked.net[2].weight.register_hook(lambda gradient: 1.0 * gradient)
    assert same_state(fit(plain, data).state, fit(hooked, data).state)
