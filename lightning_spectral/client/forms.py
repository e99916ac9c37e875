"""The forms of a module and of its user's optimizers: they are the server's, except while they are a client's."""

from __future__ import annotations

import copy
import inspect
import math
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.protocol.exchange import buffer_shapes, named_state
from lightning_spectral.protocol.kept_state import KeptState, path_to
from lightning_spectral.protocol.records import Options

TakeForm = Callable[[nn.Module, float], object]


@dataclass(frozen=True, eq=False)
class Entries:
    """What differs in a dictionary, such as a layer's parameters or hooks: entries that are new, others, or gone."""

    mapping: dict[Any, Any]
    first: Mapping[Any, Any]  # new ones before all others
    changed: Mapping[Any, Any]
    last: Mapping[Any, Any]
    gone: Collection[Any]

    def apply(self) -> None:
        kept = {key: self.changed.get(key, entry) for key, entry in self.mapping.items() if key not in self.gone}
        content = {**self.first, **kept, **self.last}
        self.mapping.clear()
        self.mapping.update(content)


@dataclass(frozen=True, eq=False)
class Form:
    """What makes a module a client of one capacity, as differences from the server.

    What is not among them is the server's, and is shared: its attributes, and hooks that are added later.

    Attributes:
        parts: For each part that differs, its class, its new attributes and the names of those that it lacks.
        entries: The dictionaries that differ.
        gradients: The server's tensors that need a gradient only here, or only there.
        server: The server's parameters, by name.
        replaced: The server's parameters that a client does not have, by name.
        buffers: Shapes of a client's buffers, by name.
        kept: The state of what only a client has, its tensors' flags among it.
    """

    parts: Sequence[tuple[nn.Module, type, Mapping[str, Any], Collection[str]]]
    entries: Sequence[Entries]
    gradients: Sequence[tuple[Tensor, bool]]
    server: Mapping[str, Tensor]
    replaced: Mapping[str, Tensor]
    buffers: Mapping[str, tuple[int, ...]]
    kept: KeptState

    def apply(self) -> None:
        """Turn the server into the client, except for the values of tensors."""
        for part, kind, attributes, missing in self.parts:
            part.__class__ = kind
            own = vars(part)
            for name in missing:
                own.pop(name, None)
            own.update(attributes)
        for entries in self.entries:
            entries.apply()
        for tensor, needs_gradient in self.gradients:
            tensor.requires_grad_(needs_gradient)


@dataclass(eq=False)
class Forms:
    """The forms of one module, in which it is the clients of each capacity in turn.

    A form is built once, in place. Taking and leaving it takes a constant time per part. In between the module is the
    client: its tensors are in the clients' memory, of which there is one copy, and one more of each tensor that only a
    capacity has. Otherwise it is the server, bit for bit.

    Args:
        module: The module.
        take_form: Turns it into a client of a capacity, in place.
        others: What else belongs to a client while it trains, such as the user's optimizers.
        owned: Whether the module is not the server's, so that its tensors are the clients' memory, and those that a
            client does not have need none.

    Example:
        >>> line = nn.Linear(2, 1, bias=False)
        >>> forms = Forms(line, lambda module, capacity: None)
        >>> with forms.client(1.0):
        ...     line.weight.data.fill_(1.0)
        ...     line.steps = 1
        tensor([[1., 1.]])
        >>> bool((line.weight == 1).any()), hasattr(line, "steps")
        (False, False)
    """

    module: nn.Module
    take_form: TakeForm
    others: Sequence[Any] = ()
    owned: bool = False
    kept: KeptState | None = field(default=None, init=False)
    _parts: list[int] = field(default_factory=list, init=False)
    _shared: dict[float, dict[str, Tensor]] = field(default_factory=dict, init=False)  # by capacity
    _form: Form | None = field(default=None, init=False)
    _last: KeptState | None = field(default=None, init=False)
    _forms: dict[float, Form] = field(default_factory=dict, init=False)
    _memory: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)
    _server: list[tuple[Tensor, Tensor]] = field(default_factory=list, init=False)

    @contextmanager
    def client(self, capacity: float, sent: Collection[str] = ()) -> Iterator[nn.Module]:
        """The module as a client within the block; see `take`."""
        assert self.kept is None, "a module is one client at a time"
        try:
            try:
                self.take(capacity, sent)
                yield self.module
            finally:
                self.give_back()
        finally:
            self.give_back()  # Ctrl-C may have kept the first from beginning

    def take(self, capacity: float, sent: Collection[str] = ()) -> Form:
        """Turn the module into a client; `give_back` must follow, whatever happens.

        Args:
            capacity: What the client can hold.
            sent: Names of the tensors that are about to be loaded; others begin with the server's values.
        """
        with postponing_interrupts():
            assert self.kept is None, "a module is one client at a time"
            if self._last is None or not self._last.renewed():
                self._last = KeptState(self.module, *self.others)
                self._forget_what_is_gone(self._last)
            self.kept = self._last
            try:
                if capacity in self._forms:
                    form = self._forms[capacity]
                    form.apply()
                else:
                    form = self._forms[capacity] = self._built(self.kept, capacity)
                self._form = form
                self._point_to_memory(capacity, sent)
            except BaseException:
                self._put_back()
                raise
            return form

    def give_back(self) -> None:
        """Turn the module into the server again, if it is not."""
        if self.kept is not None:
            with postponing_interrupts(math.inf):
                self._put_back()

    def _put_back(self) -> None:
        for tensor, data in self._server:
            tensor.data = data
        self._server.clear()
        if self.kept is not None:
            if self._form is not None:
                self._form.kept.restore()
            self.kept.restore()
            self.kept = self._form = None

    def _forget_what_is_gone(self, kept: KeptState) -> None:
        """Forget memory of tensors that the server no longer has, and all forms if its parts have changed."""
        parts = [*map(id, self.module.modules()), *map(id, self.module.parameters())]
        if parts != self._parts:
            self._parts = parts
            self._forms.clear()
        now = {id(tensor) for tensor in kept.tensors}
        self._memory = {key: entry for key, entry in self._memory.items() if key in now}
        self._shared.clear()

    def _built(self, kept: KeptState, capacity: float) -> Form:
        server = {name: tensor for name, tensor in named_state(self.module).items() if isinstance(tensor, nn.Parameter)}
        self.take_form(self.module, capacity)
        mine = named_state(self.module)
        left = {id(tensor) for tensor in mine.values()}
        parts: list[tuple[nn.Module, type, dict[str, Any], list[str]]] = []
        for part, kind, now, before in kept.parts:
            changed = {name: value for name, value in now.items() if name not in before or before[name] is not value}
            missing = [name for name in before if name not in now]
            if type(part) is not kind or changed or missing:
                parts.append((part, type(part), changed, missing))
        entries = [own for mapping, before in kept.mappings() if (own := _entry_change(mapping, before)) is not None]
        flags = [
            (tensor, tensor.requires_grad) for tensor, needed in kept.needed_gradients if tensor.requires_grad != needed
        ]
        new = [value for _, _, changed, _ in parts for value in changed.values()]
        new += [value for own in entries for found in (own.first, own.changed, own.last) for value in found.values()]
        form = Form(
            parts,
            entries,
            flags,
            server,
            {name: tensor for name, tensor in server.items() if id(tensor) not in left},
            buffer_shapes(self.module),
            KeptState(self.module, *new, without=kept),
        )
        if self.owned:
            for tensor in form.replaced.values():
                tensor.data = tensor.new_empty(()).expand(tensor.shape)
        return form

    def _point_to_memory(self, capacity: float, sent: Collection[str]) -> None:
        if self.owned:
            return
        assert self.kept is not None, "it is kept before it changes"
        if capacity not in self._shared:
            whose = {id(tensor) for tensor in self.kept.tensors}
            mine = named_state(self.module).items()
            self._shared[capacity] = {name: tensor for name, tensor in mine if id(tensor) in whose}
        shared = self._shared[capacity]
        fitting = (
            id(t) in self._memory
            and (memory := self._memory[id(t)][1]).shape == t.shape
            and (memory.dtype, memory.device) == (t.dtype, t.device)
            for t in shared.values()
        )
        if not all(fitting):
            self._allocate(shared.values())
        for name, tensor in shared.items():
            data, memory = tensor.data, self._memory[id(tensor)][1]
            if name not in sent:
                memory.copy_(data)
            self._server.append((tensor, data))
            tensor.data = memory

    def _allocate(self, tensors: Collection[Tensor]) -> None:
        """Give tensors memory; those that share some, such as an LSTM's on a GPU, share it there as well."""
        by_storage: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            data = tensor.data
            place = data.untyped_storage()._cdata if data.layout == torch.strided else id(tensor)
            by_storage.setdefault(place, []).append((tensor, data))
        for group in by_storage.values():
            storage = group[0][1].untyped_storage().clone() if len(group) > 1 else None  # type: ignore[no-untyped-call]
            for tensor, data in group:
                memory = data.clone()
                if storage is not None:
                    memory = data.new_empty(()).set_(storage, data.storage_offset(), data.shape, data.stride())
                self._memory[id(tensor)] = tensor, memory


def _entry_change(mapping: dict[Any, Any], before: dict[Any, Any]) -> Entries | None:
    gone = {key for key in before if key not in mapping}
    changed = {key: entry for key, entry in mapping.items() if key in before and before[key] is not entry}
    added = [key for key in mapping if key not in before]
    if not gone and not changed and not added:
        return None
    keys = list(mapping)
    first = [key for key in added if all(other in added for other in keys[: keys.index(key)])]
    return Entries(
        mapping, {k: mapping[k] for k in first}, changed, {k: mapping[k] for k in added if k not in first}, gone
    )


@contextmanager
def postponing_interrupts(how_many: float = 1) -> Iterator[None]:
    """Let Ctrl-C take effect at the end of the block, unless it is pressed more than ``how_many`` times."""
    own = signal.getsignal(signal.SIGINT)
    if not callable(own) or threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: list[FrameType | None] = []

    def note(signum: int, frame: FrameType | None) -> None:
        noted.append(frame)
        if len(noted) > how_many:
            own(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, own)
    if noted:
        own(signal.SIGINT, noted[0])


LISTED = 3  # further parameters are counted
NO_OPTIONS = frozenset({"params", "param_names"})  # entries of a parameter group that say what is in it
Origin = Callable[[str], str]
Overrides = Callable[[str, Options], Options]


@dataclass(frozen=True, eq=False)
class Group:
    """The parameters of a client that a group of the user's optimizer steps with the same options.

    Attributes:
        index: Index of the user's group.
        names: Names of the parameters; differing options follow from the first.
        parameters: The parameters.
    """

    index: int
    names: list[str]
    parameters: list[nn.Parameter]


class LocalOptimizer:
    """One of the user's optimizers, as a form of the module changes it; made while the module has that form.

    The optimizer stays the user's object, and so do those that it wraps. `start_client` exchanges what is in their
    parameter groups. `KeptState` puts groups, state and attributes back when the client is done.

    Args:
        optimizer: The optimizer, with the server's groups.
        server: The names of the server's parameters, by identity.
        client: The module as a client.
        origin: Maps the name of a client's parameter to that of the server's parameter that it stands for.
        overrides: Maps the name of a client's parameter, and the options of its group, to those that differ.

    Raises:
        ValueError: If the optimizer makes its state, or keeps parameters, in ways that cannot follow.

    Example:
        >>> import torch
        >>> line = nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(line.parameters(), lr=0.5)
        >>> local = LocalOptimizer(sgd, {id(p): name for name, p in line.named_parameters()}, line)
        >>> local.start_client([{"lr": 0.25}])
        >>> sgd.param_groups[0]["lr"]
        0.25
    """

    def __init__(
        self,
        optimizer: Optimizer,
        server: Mapping[int, str],
        client: nn.Module,
        origin: Origin = lambda name: name,
        overrides: Overrides = lambda name, options: {},
    ) -> None:
        self.optimizer = optimizer
        self._overrides = overrides
        self._groups: list[tuple[Optimizer, list[Group]]] = []
        self._initial_state: dict[Tensor, Any] = {}
        named = dict(client.named_parameters())
        lists: set[int] = set()
        for one in family(optimizer):
            if id(one.param_groups) in lists:
                continue  # an optimizer that shares the groups of the one that it wraps
            lists.add(id(one.param_groups))
            groups = _groups_of(one, server, named, origin, overrides)
            own = [{id(p) for p in group["params"]} for group in one.param_groups]
            if [{id(p) for p in group.parameters} for group in groups] != own:
                self._groups.append((one, groups))
        if self._groups:
            self._initial_state = self._state_of_new()
            _check_follows(optimizer, server)

    def start_client(self, options: Sequence[Options]) -> None:
        """Exchange the parameters in the groups, and set the options of the round."""
        fresh = [copy.deepcopy(dict(own)) for own in options]  # optimizers write to them
        for group, own in zip(self.optimizer.param_groups, fresh, strict=True):
            for name in group.keys() - own.keys() - NO_OPTIONS:
                del group[name]
            group.update(own)
        made: dict[tuple[int, str], dict[str, Any]] = {}
        for one, groups in self._groups:
            before, one.param_groups[:] = list(one.param_groups), []
            for part in groups:
                whole = before[part.index]
                key = id(whole), part.names[0]  # a dictionary that two optimizers share stays shared
                if key not in made:
                    kept = {name: value for name, value in whole.items() if name not in NO_OPTIONS}
                    names = {"param_names": part.names} if "param_names" in whole else {}
                    made[key] = {"params": part.parameters, **names, **kept, **self._overrides(part.names[0], kept)}
                one.param_groups.append(made[key])
        for parameter, state in self._initial_state.items():
            tensors = {id(tensor): tensor.clone() for tensor in _tensors_in(state)}
            self.optimizer.state[parameter] = copy.deepcopy(state, tensors)

    def as_now(self) -> Callable[[], None]:
        """Return what makes it as it is now: its state and the options of its groups, and of those that it wraps."""

        def copied(one: Optimizer) -> tuple[dict[Any, Any], list[dict[str, Any]]]:
            state = {parameter: copy.deepcopy(own) for parameter, own in one.state.items()}
            return state, [copy.deepcopy(dict(own)) for own in options_of(one)]

        kept = [(one, *copied(one)) for one in family(self.optimizer)]

        def put_back() -> None:
            for one, state, options in kept:
                one.state.clear()
                one.state.update({parameter: copy.deepcopy(own) for parameter, own in state.items()})
                for group, own in zip(one.param_groups, copy.deepcopy(options), strict=True):
                    group.update(own)

        return put_back

    def _state_of_new(self) -> dict[Tensor, Any]:
        """The state that a constructor makes before the first step, as Adagrad's does, for parameters that are new."""
        optimizer = self.optimizer
        new = {p for _, groups in self._groups for group in groups for p in group.parameters} - optimizer.state.keys()
        if not optimizer.state or not new:
            return {}
        kind = type(optimizer)
        accepted = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        groups = next(groups for one, groups in self._groups if one is optimizer)
        given = [{**options_of(optimizer)[group.index], "params": list(group.parameters)} for group in groups]
        try:
            made = kind(given, **options)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__} makes its state in its constructor, which has to be called again for a client's "
                f"parameters, but does not accept what the parameter groups hold ({error}). Give its arguments "
                "defaults, or make the state in the first step."
            ) from error
        return {parameter: made.state[parameter] for parameter in new if parameter in made.state}


def family(optimizer: Optimizer) -> Iterator[Optimizer]:
    """An optimizer, and those that it wraps.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.5)
        >>> list(family(sgd)) == [sgd]
        True
    """
    seen: set[int] = set()
    rest: list[Any] = [optimizer]
    while rest:
        value = rest.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Optimizer):
            yield value
            rest.extend(held for name, held in vars(value).items() if name not in ("param_groups", "state"))
        elif isinstance(value, list | tuple):
            rest.extend(value)
        elif isinstance(value, dict):
            rest.extend(value.values())


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The options of each parameter group, without its parameters: part of every `Download`."""
    return tuple({k: v for k, v in group.items() if k not in NO_OPTIONS} for group in optimizer.param_groups)


def _groups_of(
    optimizer: Optimizer,
    server: Mapping[int, str],
    named: Mapping[str, nn.Parameter],
    origin: Origin,
    overrides: Overrides,
) -> list[Group]:
    """A client's groups in the user's order; parameters with options of their own form another."""
    index_of = {
        server[id(p)]: index
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if id(p) in server
    }
    found: dict[tuple[int, tuple[tuple[str, Any], ...]], Group] = {}
    options = options_of(optimizer)
    for name, parameter in named.items():
        if (index := index_of.get(origin(name))) is None:
            continue  # not in the user's optimizer, so it is not trained
        key = index, tuple(overrides(name, options[index]).items())
        group = found.setdefault(key, Group(index, [], []))
        group.names.append(name)
        group.parameters.append(parameter)
    return sorted(found.values(), key=lambda group: group.index)


def _check_follows(optimizer: Optimizer, server: Mapping[int, str]) -> None:
    """Raise ``ValueError`` if an optimizer refers to the server's parameters besides its groups."""
    for one in family(optimizer):
        roots = {name: value for name, value in vars(one).items() if name not in ("param_groups", "state", "step")}
        for name, value in roots.items():
            held = value if isinstance(value, list | tuple) else [value]
            if any(id(entry) in server for entry in held):
                raise ValueError(
                    f"{type(one).__name__} keeps parameters of the module in `{name}`, besides its groups, and clients "
                    "hold something else in their place; read them from `self.param_groups` in each step, or keep "
                    "the layers whole with `exclude`."
                )


def check_optimizer(template: Optimizer) -> None:
    """Check that clients can step with one of the user's optimizers.

    Raises:
        ValueError: If it keeps a copy of every parameter from before the first round, which no client starts from.
    """
    for one in family(template):
        parameters = [p for group in one.param_groups for p in group["params"]]
        shapes, own = [p.shape for p in parameters], {id(p) for p in parameters}
        for name, value in vars(one).items():
            held = [] if name in ("param_groups", "state") else list(_tensors_in(value))
            is_copy = [t.shape for t in held[: len(shapes)]] == shapes and not any(id(t) in own for t in held)
            if is_copy and any(t.numel() > 1 for t in held):
                raise ValueError(
                    f"{type(one).__name__} cannot step clients, because its `{name}` holds a tensor for each "
                    "parameter, made when it was constructed, and each client starts from other weights; keep such "
                    "tensors in `self.state[parameter]`, made in the first step."
                )


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors in lists and dictionaries, also of the user's classes, that may contain each other."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(entry, depth - 1)


def trainable_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The trainable parameters of several optimizers, each once, in order."""
    parameters = [parameter for optimizer in optimizers for _, parameter in placed(optimizer)]
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def untrained_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module that need a gradient, but that no optimizer steps.

    Example:
        >>> import torch
        >>> line = nn.Linear(2, 1)
        >>> untrained_parameters([torch.optim.SGD([line.weight], lr=0.1)], line)
        ('bias',)
    """
    trained = {id(parameter) for parameter in trainable_parameters(optimizers)}
    return tuple(name for name, p in module.named_parameters() if p.requires_grad and id(p) not in trained)


def check_own_parameters(template: Optimizer, module: nn.Module, configure: Callable[..., Any]) -> None:
    """Check that all trainable parameters of an optimizer are the module's: no others are sent to clients.

    Args:
        template: One of the user's optimizers.
        module: The user's module.
        configure: The function that made the optimizer; its global variables are searched too.

    Raises:
        ValueError: If one is not; the message says where it is kept, if it can be found.
    """
    if not (foreign := foreign_parameters(template, module)):
        return
    roots: dict[str, Any] = {"self": module}
    if inspect.isfunction(inspect.unwrap(getattr(configure, "__func__", configure))):  # it is written in Python
        used = inspect.getclosurevars(configure)
        roots |= {**used.globals, **used.nonlocals}
    described = []
    for place, parameter in foreign[:LISTED]:
        where = path_to(parameter, roots)
        described.append(f"{place}, of shape {tuple(parameter.shape)}" + (f", in `{where}`" if where else ""))
    more = f"; and {len(foreign) - LISTED} more" if len(foreign) > LISTED else ""
    raise ValueError(
        f"Parameters of {type(template).__name__} are not {type(module).__name__}'s, so no client would train them: "
        f"{'; '.join(described)}{more}. Make them the module's: keep layers in an nn.ModuleList or nn.ModuleDict, and "
        "a loss or a parameter of its own in an attribute, self.loss = ...; or leave them out of the optimizer."
    )


def check_still_own(optimizer: Optimizer, module: nn.Module) -> None:
    """Raise ``ValueError`` if the module has lost parameters of its optimizer since this was made, e.g. in a hook."""
    if foreign := foreign_parameters(optimizer, module):
        listed = ", ".join(f"{place} of shape {tuple(parameter.shape)}" for place, parameter in foreign[:LISTED])
        raise ValueError(
            f"{type(module).__name__} no longer has what its {type(optimizer).__name__} trains ({listed}): a hook has "
            "replaced a layer or a parameter, and the new one would not be trained. Replace it before the fit, or "
            "change its values in place, with `copy_` under torch.no_grad()."
        )


def foreign_parameters(optimizer: Optimizer, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters of an optimizer that are not a module's, each with its place in the optimizer."""
    own = {id(parameter) for parameter in module.parameters()}
    return [(place, p) for place, p in placed(optimizer) if p.requires_grad and id(p) not in own]


def placed(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of an optimizer, with its place there."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"parameter {position} of group {index}", parameter
