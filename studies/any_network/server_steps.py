"""Steps of the server that were tried in place of bounded momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_spectral.server.optimizers import BoundedMomentumSGD, FedOptimizer


class ExponentialMeanSGD(torch.optim.Optimizer):
    """Steps by the bias-corrected exponential mean of the changes, which shrinks where rounds cancel."""

    def __init__(self, params: Iterable[Tensor], momentum: float) -> None:
        super().__init__(params, {"lr": 1.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the server's parameters at the end of a round."""
        for group in self.param_groups:
            beta = group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["num"] = state.get("num", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(p)).mul_(beta).add_(p.grad, alpha=1 - beta)
                p.sub_(mean, alpha=group["lr"] / (1 - beta ** state["num"]))
        return None


class PerParameterSGD(torch.optim.Optimizer):
    """Bounded momentum with norms and a cosine of each parameter's own."""

    def __init__(self, params: Iterable[Tensor], momentum: float) -> None:
        params = list(params)
        super().__init__(params, {"lr": 1.0})
        self._own = [BoundedMomentumSGD([p], 1.0, momentum) for p in params if isinstance(p, Tensor)]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the server's parameters at the end of a round."""
        for optimizer in self._own:
            optimizer.step()
        return None


@dataclass(frozen=True)
class Tried(FedOptimizer):
    """A class above, with its share of the past."""

    kind: Any
    momentum: float = 0.8

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Create the optimizer of the server's parameters."""
        optimizer: torch.optim.Optimizer = self.kind(parameters, self.momentum)
        return optimizer
