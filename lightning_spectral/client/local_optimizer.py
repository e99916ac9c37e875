"""The user's optimizer, rebuilt over a client's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.protocol.records import Options

Origin = Callable[[str], str]


@dataclass(frozen=True)
class OptimizerRecipe:
    """Everything needed to rebuild an optimizer elsewhere: picklable, and without parameters.

    Attributes:
        optimizer_class: Class of the user's optimizer.
        defaults: Arguments of its constructor.
        groups: For each parameter group, the names of the server's parameters in it.
        options: For each parameter group, its options when the recipe was written.

    Example:
        >>> import torch
        >>> line = nn.Linear(2, 1)
        >>> recipe_of(torch.optim.SGD(line.parameters(), lr=0.5), line).groups
        (('weight', 'bias'),)
    """

    optimizer_class: type[Optimizer]
    defaults: Options
    groups: tuple[tuple[str, ...], ...]
    options: tuple[Options, ...]

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
        ValueError: If it needs a closure, or has step hooks.
    """
    check_optimizer(template)
    names = {id(parameter): name for name, parameter in server.named_parameters()}
    accepted = inspect.signature(type(template)).parameters
    return OptimizerRecipe(
        type(template),
        {name: value for name, value in template.defaults.items() if name in accepted},
        tuple(tuple(names[id(p)] for p in g["params"] if id(p) in names) for g in template.param_groups),
        options_of(template),
    )


def options_of(optimizer: Optimizer) -> tuple[Options, ...]:
    """The options of each parameter group, without its parameters: part of every `Download`."""
    return tuple({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)


@dataclass(frozen=True)
class LocalOptimizer:
    """The optimizer of one sub-model, reset for every client.

    Attributes:
        optimizer: The optimizer of the sub-model's parameters.
        followed: For each of its parameter groups, the index of the recipe's group whose options it takes.
        overrides: For each of its parameter groups, options that differ from these, e.g. ``{"weight_decay": 0}``.
        on_options: Called with the recipe's options of each round; ``None`` for nothing.
    """

    optimizer: Optimizer
    followed: tuple[int, ...]
    overrides: tuple[Options, ...]
    on_options: Callable[[Sequence[Options]], None] | None = None

    def start_client(self, options: Sequence[Options]) -> None:
        """Clear the state of the previous client, such as momentum, and set the round's options."""
        self.optimizer.state.clear()
        groups = zip(self.optimizer.param_groups, self.followed, self.overrides, strict=True)
        for group, index, override in groups:
            group.update({**options[index], **override})
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

    Raises:
        ValueError: If the optimizer needs arguments that its parameter groups do not hold.

    Example:
        >>> import copy, torch
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
        groups[keys.index(key)]["params"].append(parameter)
    order = sorted(range(len(keys)), key=lambda i: keys[i][0])  # in the user's order
    optimizer = _construct(recipe, [groups[i] for i in order])
    followed, differing = zip(*(keys[i] for i in order), strict=True)
    return LocalOptimizer(optimizer, followed, tuple(map(dict, differing)))


def trainable_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """The trainable parameters of several optimizers, each once, in order."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def check_optimizer(template: Optimizer) -> None:
    """Raise ``ValueError`` if the optimizer needs a closure to step, or has hooks, which clients would not run."""
    hooks = [vars(template).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    if any(hooks):
        raise ValueError(
            f"{type(template).__name__} has step hooks, which are not copied to the optimizers of clients; use "
            "`on_before_optimizer_step` instead."
        )
    closure = inspect.signature(type(template).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(template).__name__} needs a closure that evaluates the loss again, which local training does not "
            "provide; use an optimizer whose `step()` works without one, such as SGD."
        )


def _construct(recipe: OptimizerRecipe, groups: Sequence[dict[str, Any]]) -> Optimizer:
    try:
        return recipe.optimizer_class(list(groups), **recipe.defaults)
    except TypeError as error:
        raise ValueError(
            f"{recipe.optimizer_class.__name__} cannot be rebuilt over a client's parameters from its parameter groups "
            f"({error}); give its constructor's arguments defaults, or use an optimizer of torch.optim."
        ) from error
