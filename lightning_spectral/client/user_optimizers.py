"""What the user's optimizers must be like, so that clients can have others like them, and the recipes of these."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.client.local_optimizer import OWNER, Attributes, OptimizerRecipe, added_attributes, options_of
from lightning_spectral.client.training_checks import LISTED, foreign_parameters, placed
from lightning_spectral.protocol.attribute_paths import path_to


def recipe_of(template: Optimizer, server: nn.Module) -> OptimizerRecipe:
    """Describe the optimizer that the user's ``configure_optimizers`` returned.

    Args:
        template: The user's optimizer, over ``server``'s parameters.
        server: The user's module.

    Raises:
        ValueError: If it cannot be rebuilt for clients: see `check_optimizer`.

    Example:
        >>> import torch
        >>> line = nn.Linear(2, 1)
        >>> recipe_of(torch.optim.SGD(line.parameters(), lr=0.5), line).groups
        (('weight', 'bias'),)
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


def attributes_of(template: Optimizer) -> Attributes:
    """Copy the attributes that the class of a user's optimizer adds to those of torch: its own options, its counters.

    Raises:
        ValueError: If one holds another optimizer or belongs to the server's parameters, or cannot be copied.

    Example:
        >>> import torch
        >>> class Counting(torch.optim.SGD):
        ...     def __init__(self, params, lr, start):
        ...         super().__init__(params, lr)
        ...         self.num_steps = start
        >>> attributes_of(Counting([torch.zeros(2, requires_grad=True)], lr=0.1, start=3))
        {'num_steps': 3}
    """
    parameters = [parameter for group in template.param_groups for parameter in group["params"]]
    return {name: _copied(template, name, value, parameters) for name, value in added_attributes(template).items()}


def _copied(template: Optimizer, name: str, value: Any, parameters: Sequence[Tensor]) -> Any:
    kind = type(template).__name__
    if wrapped := [one for one in _optimizers_in(value) if one is not template]:
        raise ValueError(
            f"{kind} wraps another optimizer ({type(wrapped[0]).__name__}, in `{name}`), whose parameters are the "
            f"server's, so a client's copy would train nothing; return {type(wrapped[0]).__name__} itself from "
            f"`configure_optimizers`, or a subclass of it that does what {kind} does."
        )
    memo: dict[int, Any] = {id(template): OWNER}
    try:
        copied = copy.deepcopy(value, memo)
    except Exception as error:
        raise ValueError(
            f"{kind} cannot be rebuilt for clients, because its `{name}` cannot be copied: {error}. Make it where it "
            "is used, or use an optimizer of torch.optim."
        ) from error
    if _belongs_to(parameters, memo):
        raise ValueError(
            f"{kind} cannot be rebuilt for clients, because its `{name}` holds the server's parameters, or a tensor "
            "for each of them; keep such tensors in `self.state[parameter]`, made in the first step."
        )
    return copied


def _optimizers_in(value: Any) -> list[Optimizer]:
    if isinstance(value, Mapping):
        value = list(value.values())
    values = value if isinstance(value, list | tuple) else [value]
    return [one for one in values if isinstance(one, Optimizer)]


def _belongs_to(parameters: Sequence[Tensor], memo: Mapping[int, Any]) -> bool:
    """Whether what was copied includes one of the parameters, or tensors that look like copies of all of them."""
    if any(id(parameter) in memo for parameter in parameters):
        return True
    wanted = Counter((parameter.shape, parameter.dtype) for parameter in parameters)
    found = Counter((value.shape, value.dtype) for value in memo.values() if isinstance(value, Tensor))
    return wanted <= found and any(shape.numel() > 1 for shape, _ in wanted)


def check_optimizer(template: Optimizer) -> None:
    """Check that an optimizer can be rebuilt for clients, and that they can step with it.

    Raises:
        ValueError: If it has hooks or a ``step`` that its class does not define, needs a closure, or keeps what cannot
            be copied.
    """
    kind = type(template).__name__
    hooks = [vars(template).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post")]
    if any(hooks):
        raise ValueError(
            f"{kind} has step hooks, which are not copied to the optimizers of clients; use "
            "`on_before_optimizer_step` instead."
        )
    if _has_other_step(template):
        raise ValueError(
            f"The `step` of this {kind} was replaced on the instance, which the optimizers of clients would not have; "
            f"define it in a subclass of {kind}."
        )
    closure = inspect.signature(type(template).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{kind} needs a closure that evaluates the loss again, which local training does not provide; use an "
            "optimizer whose `step()` works without one, such as SGD."
        )
    attributes_of(template)


def _has_other_step(template: Optimizer) -> bool:
    """Whether ``step`` was replaced on the instance, other than by a scheduler, which only notes that it was called."""
    step = vars(template).get("step")
    if step is None:
        return False
    if not hasattr(step, "__wrapped__"):  # torch 2.4 has only this mark
        return not hasattr(step, "_wrapped_by_lr_sched")
    return bool(step.__wrapped__ is not type(template).step)


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
    listed = "; ".join(_described(place, p, module, configure) for place, p in foreign[:LISTED])
    more = f"; and {len(foreign) - LISTED} more" if len(foreign) > LISTED else ""
    raise ValueError(
        f"Parameters of {type(template).__name__} are not {type(module).__name__}'s, so no client would train them: "
        f"{listed}{more}. Make them the module's: keep layers in an nn.ModuleList or nn.ModuleDict, and a loss or a "
        "parameter of its own in an attribute, self.loss = ...; or leave them out of the optimizer."
    )


def _described(place: str, parameter: Tensor, module: nn.Module, configure: Callable[..., Any]) -> str:
    where = path_to(parameter, {"self": module, **_variables_of(configure)})
    return f"{place}, of shape {tuple(parameter.shape)}" + (f", in `{where}`" if where else "")


def _variables_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The variables outside of a function that it uses; none if it is not written in Python."""
    if not inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))):
        return {}
    used = inspect.getclosurevars(function)
    return {**used.globals, **used.nonlocals}
