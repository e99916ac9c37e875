"""Momentum at the server that turns a round's step and never lengthens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer


class BoundedMomentumSGD(Optimizer):
    r"""Steps in the direction of Nesterov's momentum, as long as the clients' mean change or shorter.

    .. math::
        v_t = \beta v_{t-1} + \Delta_t , \qquad d_t = \Delta_t + \beta v_t , \qquad
        x_{t+1} = x_t + \eta \big(1 + \min(0, \cos(\Delta_t, v_{t-1}))\big) \|\Delta_t\| \frac{d_t}{\|d_t\|}

    with norms and the cosine over all parameters; the pseudo-gradient is :math:`-\Delta_t`. The first step, and all of
    them with :math:`\beta = 0`, is plain averaging, to the last bit.

    Args:
        params: The server's parameters.
        lr: Learning rate eta; that of a group acts on its own part of the step.
        momentum: The share beta of the past that is kept.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the server's parameters at the end of a round."""
        loss = closure() if closure is not None else None
        moved = [(p, p.grad, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if moved:
            changes = [change for _, change, _ in moved]
            agreement = self._agreement(moved)
            directions = [self._direction(p, change, group["momentum"]) for p, change, group in moved]
            # Of the first change and its direction, which are equal, this is exactly 1; 0 / 0 is a round of no change.
            factor = ((1 + agreement.clamp(max=0.0)) * _norm(changes) / _norm(directions)).nan_to_num(nan=1.0)
            rates = [group["lr"] * factor for *_, group in moved]
            torch._foreach_sub_([p for p, *_ in moved], list(map(torch.mul, directions, rates)))
        return loss

    def _agreement(self, moved: Sequence[tuple[Tensor, Tensor, dict[str, float]]]) -> Tensor:
        """The cosine of the angle between the changes and the past; 0 if there is none."""
        pasts = {p: state["momentum_buffer"] for p, *_ in moved if "momentum_buffer" in (state := self.state[p])}
        if not pasts:
            return moved[0][1].new_zeros((), dtype=torch.float64)
        changes = [change for p, change, _ in moved if p in pasts]
        products = [(change.double() * past).sum() for change, past in zip(changes, pasts.values(), strict=True)]
        return (torch.stack(products).sum() / (_norm(changes) * _norm(list(pasts.values())))).nan_to_num(nan=0.0)

    def _direction(self, parameter: Tensor, change: Tensor, momentum: float) -> Tensor:
        """Minus the direction d of one parameter, whose past is updated."""
        state = self.state[parameter]
        if momentum == 0.0:
            return change
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = change.clone()
            return change
        past: Tensor = state["momentum_buffer"].mul_(momentum).add_(change)
        return change + momentum * past


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of all entries together; in float64, in which no entry of a change overflows when it is squared."""
    whole: Tensor = torch.stack([tensor.double().norm() for tensor in tensors]).norm()
    return whole
