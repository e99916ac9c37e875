"""The user's optimizer, rebuilt over a client's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

Origin = Callable[[str], str]


@dataclass(frozen=True)
class LocalOptimizer:
    """An optimizer that every client of one sub-model starts afresh.

    Attributes:
        optimizer: Steps the sub-model's parameters.
        template: The user's own optimizer over the server's parameters; its options, the learning rate of the round
            among them, hold for every client.
        template_groups: For each parameter group of ``optimizer``, the group of ``template`` that it follows.
        overrides: For each parameter group of ``optimizer``, options that do not follow, e.g. ``{"weight_decay": 0}``.
    """

    optimizer: Optimizer
    template: Optimizer
    template_groups: tuple[int, ...]
    overrides: tuple[dict[str, Any], ...] = field(default=())

    def start_client(self) -> None:
        """Forget the last client's momentum and take over the round's learning rate."""
        self.optimizer.state.clear()
        groups = zip(self.optimizer.param_groups, self.template_groups, self.overrides, strict=True)
        for group, index, override in groups:
            group.update({k: v for k, v in self.template.param_groups[index].items() if k != "params"}, **override)


def rebuild_optimizer(
    template: Optimizer,
    server: nn.Module,
    client: nn.Module,
    origin: Origin = lambda name: name,
    overrides: Callable[[str], dict[str, Any]] = lambda name: {},
) -> LocalOptimizer:
    """Rebuild the user's optimizer, group by group, over a client's parameters.

    Args:
        template: The optimizer that the user's ``configure_optimizers`` returned, over ``server``'s parameters.
        server: The user's module.
        client: A sub-model of it.
        origin: From the name of a client's parameter to the server's parameter that it stands for.
        overrides: From the name of a client's parameter to options in which it departs from its group.

    Raises:
        ValueError: If the optimizer needs arguments that its parameter groups do not hold, or a closure.

    Example:
        >>> import copy, torch
        >>> server = nn.Linear(2, 2)
        >>> template = torch.optim.SGD(server.parameters(), lr=0.5, momentum=0.9)
        >>> rebuild_optimizer(template, server, copy.deepcopy(server)).optimizer.param_groups[0]["momentum"]
        0.9
    """
    check_optimizer(template)
    group_of = _group_of_parameter(template, server)
    groups: list[dict[str, Any]] = []
    keys: list[tuple[int, tuple[tuple[str, Any], ...]]] = []
    for name, parameter in client.named_parameters():
        if (index := group_of.get(origin(name))) is None:
            continue  # the user left it out of the optimizer: it stays as it is
        key = (index, tuple(overrides(name).items()))
        if key not in keys:
            keys.append(key)
            options = {k: v for k, v in template.param_groups[index].items() if k != "params"}
            groups.append({**options, **overrides(name), "params": []})
        groups[keys.index(key)]["params"].append(parameter)
    order = sorted(range(len(keys)), key=lambda i: keys[i][0])  # as the user wrote them
    optimizer = _construct(template, [groups[i] for i in order])
    followed, departures = zip(*(keys[i] for i in order), strict=True)
    return LocalOptimizer(optimizer, template, followed, tuple(map(dict, departures)))


def trainable_parameters(optimizers: Sequence[Optimizer]) -> list[nn.Parameter]:
    """What some optimizers step, each parameter once, in their order."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def check_optimizer(template: Optimizer) -> None:
    """Raise ``ValueError`` if the optimizer needs a closure to step, or has hooks that clients' would not have."""
    hooks = [vars(template).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    if any(hooks):
        raise ValueError(
            f"{type(template).__name__} has step hooks, which the optimizers of clients do not take over; act in "
            "`on_before_optimizer_step` instead."
        )
    closure = inspect.signature(type(template).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(template).__name__} needs a closure that evaluates the loss again, which local training does not "
            "give; use an optimizer whose `step()` works without one, such as SGD."
        )


def _group_of_parameter(template: Optimizer, server: nn.Module) -> dict[str, int]:
    names = {id(parameter): name for name, parameter in server.named_parameters()}
    return {names[id(p)]: i for i, group in enumerate(template.param_groups) for p in group["params"] if id(p) in names}


def _construct(template: Optimizer, groups: Sequence[dict[str, Any]]) -> Optimizer:
    kind = type(template)
    accepted = inspect.signature(kind).parameters
    options = {name: value for name, value in template.defaults.items() if name in accepted}
    try:
        return kind(list(groups), **options)
    except TypeError as error:
        raise ValueError(
            f"{kind.__name__} cannot be rebuilt over a client's parameters from its parameter groups ({error}); "
            "give its constructor's arguments defaults, or use an optimizer of torch.optim."
        ) from error
