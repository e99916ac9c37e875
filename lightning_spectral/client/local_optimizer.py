"""The user's optimizer, rebuilt over a client's parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.client.optimizer_checks import Attributes, attributes_of, check_optimizer, reset_attributes
from lightning_spectral.protocol.records import Options

Origin = Callable[[str], str]
NO_OPTIONS = frozenset({"params", "param_names"})  # entries of a parameter group that say what is in it


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

    Example:
        >>> import torch
        >>> line = nn.Linear(2, 1)
        >>> recipe_of(torch.optim.SGD(line.parameters(), lr=0.5), line).groups
        (('weight', 'bias'),)
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


def recipe_of(template: Optimizer, server: nn.Module) -> OptimizerRecipe:
    """Describe the optimizer that the user's ``configure_optimizers`` returned.

    Args:
        template: The user's optimizer, over ``server``'s parameters.
        server: The user's module.

    Raises:
        ValueError: If it cannot be rebuilt for clients: see `check_optimizer`.
    """
    check_optimizer(template)
    names = {id(parameter): name for name, parameter in server.named_parameters()}
    return OptimizerRecipe(
        type(template),
        dict(template.defaults),
        attributes_of(template),
        tuple(tuple(names[id(p)] for p in g["params"] if id(p) in names) for g in template.param_groups),
        options_of(template),
        is_named=any("param_names" in group for group in template.param_groups),
        makes_state=bool(template.state),
    )


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
        >>> import torch
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
