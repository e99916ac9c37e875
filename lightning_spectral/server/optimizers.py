"""Server optimizers: one step per round on the pseudo-gradient, which is minus the clients' mean change.

Frozen dataclasses for ``FederatedModule(server_optimizer=...)``. When called with the server's parameters, each returns
a torch optimizer, so Lightning runs its steps, counts them and saves its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.arguments import Number, Rule, check_fields

DECAY = Number(at_least=0, below=1, hint="it is the share of the past that a moment keeps")


def _two_decays(argument: str, betas: Any) -> tuple[float, ...]:
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"`{argument}` must be two numbers, for the first and the second moment, got {betas!r}.")
    return tuple(DECAY(argument, beta) for beta in betas)


RULES: Mapping[str, Rule] = {"lr": Number(above=0), "momentum": DECAY, "betas": _two_decays, "tau": Number(above=0)}


class FedOptimizer(ABC):
    """Base class of server optimizers: settings that create the torch optimizer once there are parameters.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If one is out of range.
    """

    @abstractmethod
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""


class _OwnOptimizer(FedOptimizer):
    def __post_init__(self) -> None:
        check_fields(self, **{name: RULES[name] for name in vars(self)})


@dataclass(frozen=True, kw_only=True)  # the first number that one thinks of is the momentum
class FedAvgM(_OwnOptimizer):
    """Averaging with server momentum: ``v <- momentum v + pseudo-gradient``, then a step of ``lr v``.

    Momentum 0 and learning rate 1 are plain averaging, which is what ``server_optimizer=None`` does.

    Args:
        lr: Server learning rate.
        momentum: Share of the previous step that is repeated, in ``[0, 1)``.

    Reference:
        Hsu, Qi and Brown (2019), Measuring the effects of non-identical data distribution for federated visual
        classification; Reddi et al. (2021), section 5, for the momentum.

    Example:
        >>> FedAvgM(momentum=0.5)(nn.Linear(2, 1).parameters()).param_groups[0]["momentum"]
        0.5
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


AVERAGING = FedAvgM(momentum=0.0)  # the server's step unless the user chooses another, whatever the algorithm


@dataclass(frozen=True, kw_only=True)
class BoundedMomentum(_OwnOptimizer):
    r"""Momentum that turns the server's step and never makes it longer than the clients' mean change.

    .. math::
        v_t = \beta v_{t-1} + \Delta_t , \qquad d_t = \Delta_t + \beta v_t , \qquad
        x_{t+1} = x_t + \eta \big(1 + \min(0, \cos(\Delta_t, v_{t-1}))\big) \|\Delta_t\| \frac{d_t}{\|d_t\|}

    :math:`\Delta_t` is the clients' mean change in round t; norms and the cosine are over all parameters. What rounds
    have in common adds up in the direction, and a change that undoes what the rounds before it did shortens the step.
    `FedAvgM` makes steps up to :math:`1/(1 - \beta)` times as long, and where clients' data differ, so that each round
    undoes part of the last one, it diverges at learning rates at which plain averaging does not.

    The common length has a price: beside a large layer that swings, a small one may move further than its own change.
    Around an optimum the weights are noisier than with plain averaging, and with few and unequal clients in a round
    they miss it (``tests/server/test_optimizers.py`` has the figures).

    Args:
        lr: Server learning rate eta.
        momentum: The share beta of the past that is kept, in ``[0, 1)``; 0 is plain averaging.

    Note:
        A round in which no client's training changes anything changes nothing, whatever the rounds before it did.

    Reference:
        Nesterov's momentum as in Sutskever et al. (2013), with a length of our own; the documentation's study of small
        networks compares it with others.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2))
        >>> optimizer = BoundedMomentum(momentum=0.5)([weight])
        >>> for change in ([3.0, 4.0], [3.0, 4.0], [0.0, 0.0]):
        ...     weight.grad = -torch.tensor(change)
        ...     optimizer.step()
        >>> weight.data
        tensor([6., 8.])
    """

    lr: float = 1.0
    momentum: float = 0.8

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return BoundedMomentumSGD(parameters, self.lr, self.momentum)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(_OwnOptimizer):
    r"""Adagrad on the server: :math:`v_t = v_{t-1} + \Delta_t^2`.

    Args:
        lr: Server learning rate.
        momentum: Decay :math:`\beta_1` of the first moment, in ``[0, 1)``; the paper uses none.
        tau: Added to the square root of the second moment, which starts at ``tau**2``; in units of a round's change.

    Reference:
        Reddi et al. (2021), Adaptive federated optimization, Algorithm 2 (FEDADAGRAD).

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(1))
        >>> optimizer = FedAdagrad(lr=0.1, tau=1.0)([weight])
        >>> weight.grad = torch.tensor([-3.0])
        >>> optimizer.step()
        >>> abs(weight.item() - 0.1 * 3 / (10 ** 0.5 + 1)) < 1e-7
        True
    """

    lr: float = 0.1
    momentum: float = 0.0
    tau: float = 1e-3

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return ServerAdagrad(parameters, self.lr, (self.momentum, 0.0), self.tau)


@dataclass(frozen=True, kw_only=True)
class _TwoMoments(_OwnOptimizer):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class FedAdam(_TwoMoments):
    r"""Adam on the server: :math:`v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2`, without bias correction.

    Args:
        lr, tau: As of `FedAdagrad`.
        betas: Decay of the first and of the second moment, both in ``[0, 1)``.

    Reference:
        Reddi et al. (2021), Adaptive federated optimization, Algorithm 2 (FEDADAM); ``betas`` as in section 5.

    Example:
        >>> FedAdam(lr=0.01)
        FedAdam(lr=0.01, betas=(0.9, 0.99), tau=0.001)
    """

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return ServerAdam(parameters, self.lr, self.betas, self.tau)


@dataclass(frozen=True, kw_only=True)
class FedYogi(_TwoMoments):
    r"""Yogi on the server: :math:`v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \mathrm{sign}(v_{t-1} - \Delta_t^2)`.

    Args:
        lr, betas, tau: As of `FedAdam`.

    Reference:
        Reddi et al. (2021), Adaptive federated optimization, Algorithm 2 (FEDYOGI); ``betas`` as in section 5.

    Example:
        >>> FedYogi(betas=(0.9, 1.0))
        Traceback (most recent call last):
        ValueError: `betas` must be in [0, 1), got 1.0; it is the share of the past that a moment keeps.
    """

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        return ServerYogi(parameters, self.lr, self.betas, self.tau)


class BoundedMomentumSGD(Optimizer):
    """The step of `BoundedMomentum`, with norms and the cosine over the parameters of all groups.

    The first step, and all of them with momentum 0, is plain averaging, to the last bit.

    Args:
        params: The server's parameters.
        lr: Learning rate eta; that of a group acts on its own part of the step.
        momentum: The share beta of the past that is kept.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
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


class AdaptiveServerOptimizer(Optimizer, ABC):
    r"""Algorithm 2 of Reddi et al. (2021); subclasses define the second moment.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) \Delta_t , \qquad
        x_{t+1} = x_t + \eta\, m_t / (\sqrt{v_t} + \tau)

    with :math:`m_{-1} = 0` and :math:`v_{-1} = \tau^2`; the pseudo-gradient is :math:`-\Delta_t`. Unlike
    `torch.optim.Adam` it does not correct bias, and unlike `torch.optim.Adagrad` it has a first moment.

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
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not (parameters := [p for p in group["params"] if p.grad is not None]):
                continue
            for parameter in parameters:
                if not (state := self.state[parameter]):
                    state["first_moment"] = torch.zeros_like(parameter)
                    state["second_moment"] = torch.full_like(parameter, group["tau"] ** 2)
            gradients, states = [p.grad for p in parameters], [self.state[p] for p in parameters]
            first, second = [s["first_moment"] for s in states], [s["second_moment"] for s in states]
            beta1, beta2 = group["betas"]
            torch._foreach_mul_(first, beta1)
            torch._foreach_add_(first, gradients, alpha=1 - beta1)
            self.accumulate(second, list(torch._foreach_mul(gradients, gradients)), beta2)
            roots = torch._foreach_sqrt(second)
            torch._foreach_add_(roots, group["tau"])
            torch._foreach_addcdiv_(parameters, first, roots, value=-group["lr"])
        return loss


class ServerAdagrad(AdaptiveServerOptimizer):
    """The step of `FedAdagrad`; the second of ``betas`` is ignored."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        torch._foreach_add_(second, squares)


class ServerAdam(AdaptiveServerOptimizer):
    """The step of `FedAdam`."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        torch._foreach_mul_(second, beta)
        torch._foreach_add_(second, squares, alpha=1 - beta)


class ServerYogi(AdaptiveServerOptimizer):
    """The step of `FedYogi`."""

    @staticmethod
    def accumulate(second: list[Tensor], squares: list[Tensor], beta: float) -> None:
        signs = torch._foreach_sub(second, squares)
        torch._foreach_sign_(signs)
        torch._foreach_addcmul_(second, squares, signs, value=beta - 1)
