"""Server optimizers: one step per round on the pseudo-gradient, which is minus the clients' mean change.

Frozen dataclasses for ``FederatedModule(server_optimizer=...)``. Each, called with the server's parameters, returns a
torch optimizer, so Lightning runs its steps, counts them and saves its state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import SGD, Optimizer

from lightning_spectral.server.adaptive import ServerAdagrad, ServerAdam, ServerYogi


class FedOptimizer(ABC):
    """Base class of server optimizers: a choice that makes the optimizer once there are parameters."""

    @abstractmethod
    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""


@dataclass(frozen=True)
class FedAvgM(FedOptimizer):
    """Averaging with server momentum: ``v <- momentum v + pseudo-gradient``, then a step of ``lr v``.

    Momentum 0 and learning rate 1 are plain averaging, which is what ``server_optimizer=None`` does.

    Args:
        lr: Server learning rate.
        momentum: Share of the last step that is repeated, in ``[0, 1)``.

    Raises:
        ValueError: If an argument is out of range.

    Reference:
        Hsu, Qi and Brown (2019), Measuring the effects of non-identical data distribution for federated visual
        classification; Reddi et al. (2021), section 5, for the momentum.

    Example:
        >>> FedAvgM(momentum=0.5)(nn.Linear(2, 1).parameters()).param_groups[0]["momentum"]
        0.5
    """

    lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)
        _check_decay("momentum", self.momentum)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum)


@dataclass(frozen=True)
class FedAdagrad(FedOptimizer):
    r"""Adagrad on the server: :math:`v_t = v_{t-1} + \Delta_t^2`.

    Args:
        lr: Server learning rate.
        momentum: Decay :math:`\beta_1` of the first moment, in ``[0, 1)``; the paper uses none.
        tau: Added to the square root of the second moment, which starts at ``tau**2``; in the unit of a parameter's
            change per round.

    Raises:
        ValueError: If an argument is out of range.

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

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)
        _check_decay("momentum", self.momentum)
        _check_positive("tau", self.tau)

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""
        return ServerAdagrad(parameters, self.lr, (self.momentum, 0.0), self.tau)


@dataclass(frozen=True)
class _TwoMoments(FedOptimizer):
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _check_positive("lr", self.lr)
        if len(self.betas) != 2:
            raise ValueError(f"`betas` must be two numbers, for the first and the second moment, got {self.betas!r}.")
        for beta in self.betas:
            _check_decay("betas", beta)
        _check_positive("tau", self.tau)


@dataclass(frozen=True)
class FedAdam(_TwoMoments):
    r"""Adam on the server: :math:`v_t = \beta_2 v_{t-1} + (1 - \beta_2) \Delta_t^2`, without bias correction.

    Args:
        lr: Server learning rate.
        betas: Decay of the first and of the second moment, both in ``[0, 1)``.
        tau: Added to the square root of the second moment, which starts at ``tau**2``; in the unit of a parameter's
            change per round.

    Raises:
        ValueError: If an argument is out of range.

    Reference:
        Reddi et al. (2021), Adaptive federated optimization, Algorithm 2 (FEDADAM); ``betas`` as in section 5.

    Example:
        >>> FedAdam(lr=0.01)
        FedAdam(lr=0.01, betas=(0.9, 0.99), tau=0.001)
    """

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""
        return ServerAdam(parameters, self.lr, self.betas, self.tau)


@dataclass(frozen=True)
class FedYogi(_TwoMoments):
    r"""Yogi on the server: :math:`v_t = v_{t-1} - (1 - \beta_2) \Delta_t^2 \mathrm{sign}(v_{t-1} - \Delta_t^2)`.

    Args:
        lr: Server learning rate.
        betas: Decay of the first and of the second moment, both in ``[0, 1)``.
        tau: Added to the square root of the second moment, which starts at ``tau**2``; in the unit of a parameter's
            change per round.

    Raises:
        ValueError: If an argument is out of range.

    Reference:
        Reddi et al. (2021), Adaptive federated optimization, Algorithm 2 (FEDYOGI); ``betas`` as in section 5.

    Example:
        >>> FedYogi(betas=(0.9, 1.0))
        Traceback (most recent call last):
        ValueError: `betas` must be in [0, 1), got 1.0: it is the share of the past that a moment keeps.
    """

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Create the optimizer of the server's parameters."""
        return ServerYogi(parameters, self.lr, self.betas, self.tau)


def _check_positive(name: str, value: float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be positive and finite, got {value!r}.")


def _check_decay(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"`{name}` must be in [0, 1), got {value!r}: it is the share of the past that a moment keeps.")
