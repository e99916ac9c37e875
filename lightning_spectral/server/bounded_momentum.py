"""Momentum at the server that turns a round's step and never lengthens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class BoundedMomentumSGD(Optimizer):
    r"""Nesterov's momentum on the clients' mean change, with steps no longer than that change.

    .. math::
        v_t = \beta v_{t-1} + \Delta_t , \qquad d_t = \Delta_t + \beta v_t , \qquad
        x_{t+1} = x_t + \min(1, \|\Delta_t\| / \|d_t\|)\, d_t

    with the norm over all parameters; the pseudo-gradient is :math:`-\Delta_t`. The first step is plain averaging, to
    the last bit, and so are all of them with :math:`\beta = 0`.

    Args:
        params: The server's parameters.
        momentum: The share beta of the past that is kept.
    """

    def __init__(self, params: Iterable[Tensor], momentum: float) -> None:
        super().__init__(params, {"lr": 1.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the server's parameters at the end of a round."""
        loss = closure() if closure is not None else None
        groups = [(group["momentum"], [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        parameters = [parameter for _, found in groups for parameter in found]
        if parameters:
            changes = [parameter.grad for parameter in parameters]
            directions = [self._direction(p, momentum) for momentum, found in groups for p in found]
            share = (_norm(changes) / _norm(directions)).clamp(max=1.0).nan_to_num(nan=1.0)  # nothing over nothing
            torch._foreach_sub_(parameters, [share * direction for direction in directions])
        return loss

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        """Return minus the direction d of one parameter, and remember its past."""
        change, state = parameter.grad, self.state[parameter]
        assert change is not None, "parameters without a gradient do not move"
        if momentum == 0.0:
            return change
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = change.clone()
            return change
        past: Tensor = state["momentum_buffer"].mul_(momentum).add_(change)
        return change + momentum * past


def _norm(tensors: Sequence[Tensor | None]) -> Tensor:
    """The norm of all entries together; in float64, in which no entry of a change overflows when it is squared."""
    return torch.stack([tensor.double().norm() for tensor in tensors if tensor is not None]).norm()
