"""The device half of an algorithm: the contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.local_optimizer import LocalOptimizer, OptimizerRecipe
from lightning_spectral.protocol.records import Download, Upload


@dataclass(frozen=True)
class StepActions:
    """What a device half does in every local step.

    Attributes:
        before_forward: Called before each ``training_step``; ``None`` for nothing.
        before_step: Called with the optimizer before it steps, when all gradients are there; ``None`` for nothing.
    """

    before_forward: Callable[[], None] | None = None
    before_step: Callable[[Optimizer], None] | None = None


class ClientSide(ABC):
    """What a device has to know of an algorithm: a frozen, picklable choice that sees neither server nor round.

    It travels to a device once, together with the user's module. Afterwards a `Download` is all that the device gets,
    and an `Upload` all that it sends.
    """

    @abstractmethod
    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        """A sub-model of one keep ratio; its values arrive later by `load`.

        Args:
            module: The user's module; it is only read.
            capacity: The keep ratio.
        """

    @abstractmethod
    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite a sub-model's values with those that were sent."""

    @abstractmethod
    def local_optimizer(self, recipe: OptimizerRecipe, client: nn.Module) -> LocalOptimizer:
        """One of the user's optimizers over a sub-model, with the hooks that it needs."""

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """What to do in each of a client's local steps, looked up once before the first. Here: nothing."""
        return None

    @abstractmethod
    def collect(self, client: nn.Module, download: Download) -> Upload:
        """What a trained sub-model sends back: its unit and its tensors."""

    def watched(self, client: nn.Module) -> Mapping[str, nn.Parameter]:
        """For each layer that must take part in training, by name, one parameter. Here: none, nothing is sharded."""
        return {}
