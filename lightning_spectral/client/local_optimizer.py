"""The user's optimizer, rebuilt over a client's parameters and reset for every client."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.protocol.records import Options

Attributes = Mapping[str, Any]
Origin = Callable[[str], str]
NO_OPTIONS = frozenset({"params", "param_names"})  # entries of a parameter group that say what is in it


class _Owner:
    """Stands for the optimizer itself in copied attributes, e.g. in a bound method."""

    def __reduce__(self) -> str:
        return "OWNER"  # pickled by name, so that there is only one in each process


OWNER = _Owner()


@dataclass(frozen=True)
class OptimizerRecipe:
    """Everything needed to rebuild an optimizer elsewhere: picklable, and without parameters.

    Attributes:
        optimizer_class: Class of the user's optimizer.
        defaults: Default options of its groups.
        attributes: What its class keeps besides groups and state.
        groups: For each parameter group, the names of the server's parameters in it.
        options: For each parameter group, its options when the recipe was written.
        is_named: Whether the groups hold the names of their parameters.
        makes_state: Whether its constructor makes the state of the first step, as that of Adagrad does.
    """

    optimizer_class: type[Optimizer]
    defaults: Options
    attributes: Attributes
    groups: tuple[tuple[str, ...], ...]
    options: tuple[Options, ...]
    is_named: bool = False
    makes_state: bool = False

    @property
    def group_of(self) -> dict[str, int]:
        """The index of each parameter's group, by the parameter's name."""
        return {name: index for index, names in enumerate(self.groups) for name in names}


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The options of each parameter group, without its parameters: part of every `Download`."""
    return tuple({k: v for k, v in group.items() if k not in NO_OPTIONS} for group in optimizer.param_groups)


@dataclass(frozen=True)
class LocalOptimizer:
    """The optimizer of one sub-model, reset for every client.

    Attributes:
        optimizer: The optimizer of the sub-model's parameters.
        followed: For each of its parameter groups, the index of the recipe's group whose options it takes.
        overrides: For each of its parameter groups, options that differ from these, e.g. ``{"weight_decay": 0}``.
        on_options: Called with the recipe's options of each round; ``None`` for nothing.
        attributes: What its class keeps besides groups and state, as it is before the first step.
        initial_state: State of each parameter before the first step, where the constructor makes one.
    """

    optimizer: Optimizer
    followed: tuple[int, ...]
    overrides: tuple[Options, ...]
    on_options: Callable[[Sequence[Options]], None] | None = None
    attributes: Attributes = field(default_factory=dict)
    initial_state: Mapping[Tensor, Any] = field(default_factory=dict)

    def start_client(self, options: Sequence[Options]) -> None:
        """Clear what the previous client left, such as momentum and counters, and set the round's options."""
        self.optimizer.state.clear()
        reset_attributes(self.optimizer, self.attributes)
        for parameter, state in self.initial_state.items():
            self.optimizer.state[parameter] = copy.deepcopy(state)
        groups = zip(self.optimizer.param_groups, self.followed, self.overrides, strict=True)
        for group, index, override in groups:
            # copies, because optimizers write to their options, e.g. counters, or a learning rate that is a tensor
            fresh = copy.deepcopy({**options[index], **override})
            for name in group.keys() - fresh.keys() - NO_OPTIONS:
                del group[name]
            group.update(fresh)
        if self.on_options is not None:
            self.on_options(options)


def reset_attributes(optimizer: Optimizer, attributes: Attributes) -> None:
    """Give a client's optimizer fresh copies of its template's attributes, and none that steps have added."""
    for name in added_attributes(optimizer).keys() - attributes.keys():
        delattr(optimizer, name)
    if attributes:
        vars(optimizer).update(copy.deepcopy(dict(attributes), {id(OWNER): optimizer}))


def added_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer keeps besides what every optimizer of torch does."""
    return {name: value for name, value in vars(optimizer).items() if name not in _of_torch()}


@cache
def _of_torch() -> frozenset[str]:
    """Names of the attributes of every optimizer, and of those that learning-rate schedulers and Trainers add."""
    plain = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return frozenset({*vars(plain), "step", "_opt_called"})


def rebuild_optimizer(
    recipe: OptimizerRecipe,
    client: nn.Module,
    origin: Origin = lambda name: name,
    overrides: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> LocalOptimizer:
    """Rebuild the user's optimizer, group by group, over a client's parameters.

    Args:
        recipe: Recipe of the user's optimizer.
        client: A sub-model.
        origin: Maps the name of a client's parameter to that of the server's parameter that it stands for.
        overrides: Maps the name of a client's parameter to the options that differ from its group's.

    Example:
        >>> from lightning_spectral.client.user_optimizers import recipe_of
        >>> server = nn.Linear(2, 2)
        >>> recipe = recipe_of(torch.optim.SGD(server.parameters(), lr=0.5, momentum=0.9), server)
        >>> rebuild_optimizer(recipe, copy.deepcopy(server)).optimizer.param_groups[0]["momentum"]
        0.9
    """
    group_of = recipe.group_of
    groups: list[dict[str, Any]] = []
    keys: list[tuple[int, tuple[tuple[str, Any], ...]]] = []
    for name, parameter in client.named_parameters():
        if (index := group_of.get(origin(name))) is None:
            continue  # not in the user's optimizer, so it is not trained
        key = (index, tuple(overrides(name).items()))
        if key not in keys:
            keys.append(key)
            groups.append({**recipe.options[index], **overrides(name), "params": []})
        groups[keys.index(key)]["params"].append((name, parameter) if recipe.is_named else parameter)
    order = sorted(range(len(keys)), key=lambda i: keys[i][0])  # in the user's order
    optimizer = _construct(recipe, [groups[i] for i in order])
    followed, differing = zip(*(keys[i] for i in order), strict=True)
    initial_state = {parameter: copy.deepcopy(state) for parameter, state in optimizer.state.items()}
    overridden = tuple(map(dict, differing))
    return LocalOptimizer(optimizer, followed, overridden, attributes=recipe.attributes, initial_state=initial_state)


def _construct(recipe: OptimizerRecipe, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """A new optimizer of the user's class; its own constructor, whose arguments are not known, makes only its state."""
    if recipe.makes_state:
        optimizer = _constructed(recipe, groups)
    else:
        optimizer = object.__new__(recipe.optimizer_class)
        reset_attributes(optimizer, recipe.attributes)  # first, because an `add_param_group` may read them
        Optimizer.__init__(optimizer, list(groups), dict(recipe.defaults))
    return optimizer


def _constructed(recipe: OptimizerRecipe, groups: Sequence[dict[str, Any]]) -> Optimizer:
    kind = recipe.optimizer_class
    accepted = inspect.signature(kind).parameters
    try:
        return kind(list(groups), **{name: value for name, value in recipe.defaults.items() if name in accepted})
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} makes its state in its constructor, which has to be called again for a client's "
            f"parameters, but does not accept what the parameter groups hold ({error}). Give its arguments defaults, "
            "or make the state in the first step."
        ) from error
