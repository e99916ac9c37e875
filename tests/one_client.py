"""A client without a device: a module of its own beside the server, or turns that step with the user's optimizer."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_spectral.client.device import ClientSide
from lightning_spectral.client.forms import Forms
from lightning_spectral.client.user_optimizer import LocalOptimizer, options_of
from lightning_spectral.protocol.records import Download, WorkUnit


def client_of(side: ClientSide, server: nn.Module, capacity: float) -> Any:
    """A copy of the server in the form of a client, to be compared with the server."""
    client = copy.deepcopy(server)
    side.take_form(client, capacity)
    return client


class Turns:
    """Clients one after another, which the server's module is in turn, with the user's optimizer as on a device.

    Args:
        side: The device half of the algorithm.
        server: The user's module.
        optimizer: The user's optimizer.
    """

    def __init__(self, side: ClientSide, server: nn.Module, optimizer: Optimizer) -> None:
        self.side, self.optimizer = side, optimizer
        self._names = {id(parameter): name for name, parameter in server.named_parameters()}
        self._forms = Forms(server, side.take_form, (optimizer,))

    def client(self, capacity: float) -> AbstractContextManager[Any]:
        """The module as a client within the block."""
        return self._forms.client(capacity)

    def start(self, client: nn.Module) -> Callable[[], None]:
        """Begin local training with the values that the client holds; return what takes a step along its gradients."""
        options = options_of(self.optimizer)
        LocalOptimizer(self.optimizer, self._names, client, self.side.stand_ins(client)).start_client(options)
        actions = self.side.start(client, Download(WorkUnit(0), 1.0, {}))

        def step() -> None:
            if actions is not None and actions.before_step is not None:
                actions.before_step(self.optimizer)
            self.optimizer.step()

        return step
