"""The adaptive server optimizers of Reddi et al. (2021), which differ from torch's of the same name.

torch's Adam corrects the bias of its moments and starts the second one at zero; torch's Adagrad has no first moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdaptiveServerOptimizer(Optimizer, ABC):
    r"""Algorithm 2 of Reddi et al. (2021); subclasses define the second moment.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t , \qquad
        x_{t+1} = x_t + \eta\, m_t / (\sqrt{v_t} + \tau)

    with :math:`m_{-1} = 0` and :math:`v_{-1} = \tau^2`; the pseudo-gradient is :math:`-\Delta_t`. Unlike
    `torch.optim.Adam` it does not correct bias.

    Args:
        params: The server's parameters.
        lr: Server learning rate eta.
        betas: Decay of the first and of the second moment.
        tau: Degree of adaptivity, in units of a parameter's change per round.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, betas: tuple[float, float], tau: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @staticmethod
    @abstractmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        """Update second moments in place with the squares of the pseudo-gradients; both lists may be overwritten."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the server's parameters at the end of a round."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if parameters := [p for p in group["params"] if p.grad is not None]:
                self._step_group(parameters, group)
        return loss

    def _step_group(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        states = [self._state_of(p, group["tau"]) for p in parameters]
        first, second = [s["first_moment"] for s in states], [s["second_moment"] for s in states]
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        self.accumulate(second, list(torch._foreach_mul(gradients, gradients)), beta2)
        roots = torch._foreach_sqrt(second)
        torch._foreach_add_(roots, group["tau"])
        torch._foreach_addcdiv_(parameters, first, roots, value=-group["lr"])

    def _state_of(self, parameter: Tensor, tau: float) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["first_moment"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["second_moment"] = torch.full_like(parameter, tau**2, memory_format=torch.preserve_format)
        return state


class ServerAdagrad(AdaptiveServerOptimizer):
    r"""Second moment :math:`v_t = v_{t-1} + \Delta_t^2`; the second of ``betas`` is ignored."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        """Add the squares to the second moments."""
        torch._foreach_add_(second, squares)


class ServerAdam(AdaptiveServerOptimizer):
    r"""Second moment :math:`v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2`."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        """Update the moving average of the squares."""
        torch._foreach_mul_(second, beta)
        torch._foreach_add_(second, squares, alpha=1 - beta)


class ServerYogi(AdaptiveServerOptimizer):
    r"""Second moment :math:`v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \mathrm{sign}(v_{t-1} - \Delta_t^2)`."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        """Move each second moment towards its square, by a share of that square."""
        signs = torch._foreach_sub(second, squares)
        torch._foreach_sign_(signs)
        torch._foreach_addcmul_(second, squares, signs, value=beta - 1)
