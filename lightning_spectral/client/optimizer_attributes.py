"""What a class of optimizers keeps besides groups and state: copied for clients, and reset for each of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

Attributes = Mapping[str, Any]


class _Owner:
    """Stands for the optimizer itself in copied attributes, e.g. in a bound method."""

    def __reduce__(self) -> str:
        return "OWNER"  # pickled by name, so that there is only one in each process


OWNER = _Owner()


def attributes_of(template: Optimizer) -> Attributes:
    """Copy the attributes that the class of a user's optimizer adds to those of torch: its own options, its counters.

    Raises:
        ValueError: If one holds another optimizer or belongs to the server's parameters, or cannot be copied.

    Example:
        >>> class Counting(SGD):
        ...     def __init__(self, params, lr, start):
        ...         super().__init__(params, lr)
        ...         self.num_steps = start
        >>> attributes_of(Counting([torch.zeros(2, requires_grad=True)], lr=0.1, start=3))
        {'num_steps': 3}
    """
    parameters = [parameter for group in template.param_groups for parameter in group["params"]]
    return {name: _copied(template, name, value, parameters) for name, value in _added(template).items()}


def reset_attributes(optimizer: Optimizer, attributes: Attributes) -> None:
    """Give a client's optimizer fresh copies of its template's attributes, and none that steps have added."""
    for name in _added(optimizer).keys() - attributes.keys():
        delattr(optimizer, name)
    if attributes:
        vars(optimizer).update(copy.deepcopy(dict(attributes), {id(OWNER): optimizer}))


def _added(optimizer: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(optimizer).items() if name not in _of_torch()}


@cache
def _of_torch() -> frozenset[str]:
    """Names of the attributes of every optimizer, and of those that learning-rate schedulers and Trainers add."""
    plain = SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    return frozenset({*vars(plain), "step", "_opt_called"})


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
