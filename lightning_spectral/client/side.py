"""The interface of the device half of an algorithm."""

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
    """The actions of the device half of an algorithm in every local step.

    Attributes:
        before_forward: Called before each ``training_step``; ``None`` for nothing.
        before_step: Called with the optimizer before it steps, once all gradients are computed; ``None`` for nothing.
        after_forward: Called after each ``training_step``, before the backward pass of its loss; ``None`` for nothing.
    """

    before_forward: Callable[[], None] | None = None
    before_step: Callable[[Optimizer], None] | None = None
    after_forward: Callable[[], None] | None = None


class ClientSide(ABC):
    """The device half of an algorithm: a frozen, picklable object without access to the server or the round.

    It is sent to a device once, together with the user's module. From then on the device receives only a `Download`
    for each client, and sends back only an `Upload`.
    """

    @abstractmethod
    def build(self, module: nn.Module, capacity: float) -> nn.Module:
        """Build a sub-model of one keep ratio; `load` sets its values later.

        Args:
            module: The user's module; it is only read.
            capacity: The keep ratio.
        """

    @abstractmethod
    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite a sub-model's values with the downloaded ones."""

    @abstractmethod
    def local_optimizer(self, recipe: OptimizerRecipe, client: nn.Module) -> LocalOptimizer:
        """Rebuild one of the user's optimizers over a sub-model, with the algorithm's hooks."""

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """Return what to do in each local step of a client; called before the first. By default nothing."""
        return None

    @abstractmethod
    def collect(self, client: nn.Module, download: Download) -> Upload:
        """Return the unit and the tensors that a trained sub-model sends back."""

    def watched(self, client: nn.Module) -> Mapping[str, nn.Parameter]:
        """One parameter of each layer that some client should train, by the layer's name. By default none."""
        return {}
