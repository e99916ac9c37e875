"""The optimizers of a user: made for the server's parameters, and stepping those of a client while it trains."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.client.kept_state import all_parts, path_to
from lightning_spectral.protocol.records import Options

LISTED = 3  # further parameters are counted
NO_OPTIONS = frozenset({"params", "param_names"})  # entries of a parameter group that say what is in it


@dataclass(frozen=True)
class StandIn:
    """What a client's parameter stands for, where the server has others.

    Attributes:
        origin: The server's parameter in whose place the user's optimizer steps it; empty if none does.
        options: Given the options of its group, those with which it is stepped instead; one function makes one group.
        layer: The layer that a client trains if this parameter gets a gradient; empty for none.
    """

    origin: str
    options: Callable[[Options], Options] = lambda options: {}
    layer: str = ""


@dataclass(frozen=True, eq=False)
class Group:
    """The parameters of a client that a group of the user's optimizer steps with the same options.

    Attributes:
        index: Index of the user's group.
        named: The parameters by name.
        options: Given the options of the user's group, those that differ.
    """

    index: int
    named: dict[str, nn.Parameter]
    options: Callable[[Options], Options]


class LocalOptimizer:
    """One of the user's optimizers, as a form of the module changes it; made while the module has that form.

    The optimizer stays the user's object, and so do those that it wraps. `start_client` exchanges what is in their
    parameter groups. `KeptState` puts groups, state and attributes back when the client is done.

    Args:
        optimizer: The optimizer, with the server's groups.
        server: The names of the server's parameters, by identity.
        client: The module as a client.
        stand_ins: What the client's parameters stand for, by name; those without an entry are the server's own.

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
        stand_ins: Mapping[str, StandIn] = MappingProxyType({}),
    ) -> None:
        self.optimizer = optimizer
        self._groups: list[tuple[Optimizer, list[Group]]] = []
        named = dict(client.named_parameters())
        lists: set[int] = set()
        for one in family(optimizer):
            if id(one.param_groups) in lists:
                continue  # an optimizer that shares the groups of the one that it wraps
            lists.add(id(one.param_groups))
            groups = _groups_of(one, server, named, stand_ins)
            own = [{id(p) for p in group["params"]} for group in one.param_groups]
            if [{id(p) for p in group.named.values()} for group in groups] != own:
                self._groups.append((one, groups))
        self._initial_state = self._state_of_new()
        if self._groups:
            _check_follows(optimizer, server)

    def start_client(self, options: Sequence[Options]) -> None:
        """Exchange the parameters in the groups, and set the options of the round."""
        fresh = [copy.deepcopy(dict(own)) for own in options]  # optimizers write to them
        for group, own in zip(self.optimizer.param_groups, fresh, strict=True):
            for name in group.keys() - own.keys() - NO_OPTIONS:
                del group[name]
            group.update(own)
        made: dict[Any, tuple[dict[str, nn.Parameter], dict[str, Any]]] = {}
        for one, groups in self._groups:
            before, own_groups = list(one.param_groups), dict[int, dict[str, Any]]()
            for part in groups:
                whole = before[part.index]
                kept = {name: value for name, value in whole.items() if name not in NO_OPTIONS}
                differing = part.options(kept)
                # a dictionary that two optimizers share stays shared
                named, group = made.setdefault((id(whole), *differing.items()), ({}, {**kept, **differing}))
                named |= part.named
                group |= {"params": [*named.values()], **({"param_names": [*named]} if "param_names" in whole else {})}
                own_groups[id(group)] = group
            one.param_groups[:] = own_groups.values()
        for parameter, state in self._initial_state.items():
            tensors = {id(tensor): tensor.clone() for tensor in _tensors_in(state)}
            self.optimizer.state[parameter] = copy.deepcopy(state, tensors)

    def as_now(self) -> Callable[[], None]:
        """Return what makes it as it is now: its state and the options of its groups, and of those that it wraps."""

        def copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
            return {parameter: copy.deepcopy(own) for parameter, own in state.items()}

        kept = [(one, copied(one.state), copy.deepcopy(options_of(one))) for one in family(self.optimizer)]

        def put_back() -> None:
            for one, state, options in kept:
                one.state.clear()
                one.state.update(copied(state))
                for group, own in zip(one.param_groups, copy.deepcopy(options), strict=True):
                    group.update(own)

        return put_back

    def _state_of_new(self) -> dict[Tensor, Any]:
        """The state that a constructor makes before the first step, as Adagrad's does, for parameters that are new."""
        optimizer = self.optimizer
        used = {p for _, groups in self._groups for group in groups for p in group.named.values()}
        new = used - optimizer.state.keys()
        if not optimizer.state or not new:
            return {}
        kind = type(optimizer)
        accepted = inspect.signature(kind).parameters
        options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        groups = next(groups for one, groups in self._groups if one is optimizer)
        given = [{**options_of(optimizer)[group.index], "params": list(group.named.values())} for group in groups]
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

    def inner(whole: Any, path: str) -> Iterator[tuple[str, Any]]:
        held = {**vars(whole), "param_groups": None, "state": None} if isinstance(whole, Optimizer) else whole
        values = held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
        return (("", value) for value in values)  # a path would print keys, which may be parameters

    return (part for _, part in all_parts({"": optimizer}, inner) if isinstance(part, Optimizer))


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The options of each parameter group, without its parameters: part of every `Download`."""
    return tuple({k: v for k, v in group.items() if k not in NO_OPTIONS} for group in optimizer.param_groups)


def _groups_of(
    optimizer: Optimizer, server: Mapping[int, str], named: Mapping[str, nn.Parameter], stand_ins: Mapping[str, StandIn]
) -> list[Group]:
    """A client's groups in the user's order; parameters whose options can differ form another."""
    index_of = {
        server[id(p)]: index
        for index, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if id(p) in server
    }
    found: dict[tuple[int, object], Group] = {}
    for name, parameter in named.items():
        stand_in = stand_ins.get(name) or StandIn(name)
        if (index := index_of.get(stand_in.origin)) is None:
            continue  # not in the user's optimizer, so it is not trained
        group = Group(index, {}, stand_in.options)
        found.setdefault((index, stand_in.options), group).named[name] = parameter
    return sorted(found.values(), key=lambda group: group.index)


def work_of(num_steps: int, options: Iterable[Iterable[Options]]) -> float:
    """How far so many steps go along a constant gradient, in learning rates; without momentum, or if not SGD's, 1 each.

    Args:
        num_steps: Number of steps.
        options: For each optimizer, the options of its parameter groups.

    Raises:
        ValueError: If there are several momenta, or one is not below 1.

    Example:
        >>> momentum = {"momentum": 0.5, "dampening": 0.0, "nesterov": False}
        >>> [work_of(2, [[group]]) for group in (momentum, {**momentum, "nesterov": True}, {})]
        [2.5, 3.25, 2.0]
    """
    names, groups = ("momentum", "dampening", "nesterov"), [group for each in options for group in each]
    momenta = {tuple(float(group[name]) if "dampening" in group else 0.0 for name in names) for group in groups}
    if len({rho and (rho, *others) for rho, *others in momenta}) > 1 or any(rho >= 1 for rho, *_ in momenta):
        raise ValueError(f"Give all parameters one momentum, below 1, so that steps can be counted; got {momenta}.")
    rho, dampening, nesterov = next(iter(momenta), (0.0, 0.0, 0.0))
    if rho == 0:
        return float(num_steps)
    steady = (1.0 - dampening) / (1.0 - rho)  # what is left of gradients in the buffer, after many steps
    buffered = num_steps * steady + (1.0 - steady) * (1.0 - rho**num_steps) / (1.0 - rho)
    return num_steps + rho * buffered if nesterov else buffered


def _check_follows(optimizer: Optimizer, server: Mapping[int, str]) -> None:
    """Raise ``ValueError`` if an optimizer refers to the server's parameters besides its groups."""
    for one in family(optimizer):
        for name, value in vars(one).items():
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
    own = {id(parameter) for part in module.modules() for parameter in part._parameters.values()}
    return [(place, p) for place, p in placed(optimizer) if p.requires_grad and id(p) not in own]


def placed(optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of an optimizer, with its place there."""
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield f"parameter {position} of group {index}", parameter
