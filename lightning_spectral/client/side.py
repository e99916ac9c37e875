"""The interface of the device half of an algorithm."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.protocol.records import Download, Options, Upload


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

    It is sent to a device once. From then on the device receives only a `Download` for each client, and sends back only
    an `Upload`.
    """

    def take_form(self, module: nn.Module, capacity: float) -> None:
        """Turn the user's module into a client of a capacity, in place; `load` sets its values later.

        The device undoes all of it when the client is done. Tensors that a client has as well stay the same objects,
        and get memory of their own. By default a client has the whole module.

        Args:
            module: The user's module.
            capacity: The keep ratio.
        """
        return None

    @abstractmethod
    def load(self, client: nn.Module, download: Download) -> None:
        """Overwrite a client's values with the downloaded ones."""

    def origin(self, name: str) -> str:
        """The server's parameter that one of a client's stands for: the user's optimizer steps it in its place.

        By default itself; empty for a parameter that is not trained.
        """
        return name

    def overrides(self, name: str, options: Options) -> Options:
        """The options with which a parameter is stepped that differ from those of its group. By default none."""
        return {}

    def start(self, client: nn.Module, download: Download) -> StepActions | None:
        """Return what to do in each local step of a client; called before the first. By default nothing."""
        return None

    @abstractmethod
    def collect(self, client: nn.Module, download: Download) -> Upload:
        """Return the unit and the tensors that a trained client sends back."""

    def watched(self, client: nn.Module) -> Mapping[str, nn.Parameter]:
        """One parameter of each layer that some client should train, by the layer's name. By default none."""
        return {}
