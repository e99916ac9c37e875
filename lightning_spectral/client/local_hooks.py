"""Hooks that act while a client trains: in every step, after the backward pass, or around all steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.arguments import Number, check_fields
from lightning_spectral.client.batches import ClientData

BeforeStep = Callable[[], None]
Rows = Mapping[str, Tensor]


class LocalHook(ABC):
    """Base class of local hooks, which are started once per client and called before every step.

    A hook is a frozen dataclass without state, and its ``repr`` is saved in checkpoints. The state of one client
    belongs in the function that `start_client` returns, or in the block of `while_training`. Only `start_client` must
    be implemented.
    """

    @abstractmethod
    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep | None:
        """Prepare for a client, and return the function to call before each of its steps; ``None`` for nothing.

        The function is called without arguments after ``on_before_optimizer_step`` of the user's module, once gradients
        are computed and unscaled; Frobenius decay and `EffectiveLRClip` act afterwards. It must not read the value of a
        tensor, because that would wait for the device.

        Args:
            module: The sub-model, loaded with what the client was sent.
            optimizer: The optimizer of its parameters; if a module has several, the hook is started for each of them.
        """

    def while_training(self, module: nn.Module, data: ClientData) -> AbstractContextManager[None]:
        """Return a context manager that is entered once around all local steps of a client; does nothing by default.

        The next client trains the same sub-model, so the block must undo whatever it changes, even after an error.

        Args:
            module: The sub-model, as for `start_client`, which is called earlier.
            data: The client's data.
        """
        return nullcontext()

    def untrained_rows(self, module: nn.Module, data: ClientData) -> Rows:
        """Return the rows of parameters that this client's loss does not reach; by default none.

        Called after the client has trained. An algorithm that averages each entry over the clients that trained it
        leaves these rows out of the average.

        Args:
            module: The sub-model.
            data: The client's data.

        Returns:
            For each parameter, by name, indices along its first dimension.
        """
        return {}

    def check(self, module: nn.Module, labels: Callable[[], Tensor]) -> None:
        """Raise ``ValueError`` if the hook cannot act on a user's module, before training; by default never.

        Args:
            module: The server's module.
            labels: Returns the class of each training example; it raises ``ValueError`` if they have none.
        """
        return None


@dataclass(frozen=True)
class ProximalTerm(LocalHook):
    r"""FedProx: pulls a client's parameters towards the values that the client was sent.

    Adds the gradient :math:`\mu (w - w_0)` of :math:`\frac{\mu}{2}\|w - w_0\|^2` to that of the loss. Here w are the
    parameters that the client's optimizer updates. For a sharded layer these are the factors u and v, each pulled
    towards its own starting value: this limits the change of the factors, not of the weight that they form.
    A parameter without a gradient in a step is skipped in that step, as it is by the optimizer.

    Args:
        mu: Strength, in units of loss per squared parameter, at least 0.

    Reference:
        Li et al. (2020), Federated optimization in heterogeneous networks, equation (2).

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.zeros_(model.weight)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> before_step = ProximalTerm(mu=0.5).start_client(model, optimizer)
        >>> model.weight.grad = torch.zeros(1, 1)
        >>> _ = model.weight.data.add_(2.0)  # as a step would
        >>> before_step()
        >>> model.weight.grad
        tensor([[1.]])
    """

    mu: float

    def __post_init__(self) -> None:
        check_fields(self, mu=Number(at_least=0))

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep:
        """Copy the parameters that the client starts from."""
        # an optimizer that maximises reverses the sign of gradients
        signs = [-self.mu if group.get("maximize") else self.mu for group in optimizer.param_groups]
        groups = [[p for p in group["params"] if p.requires_grad] for group in optimizer.param_groups]
        starts = [[p.detach().clone() for p in group] for group in groups]

        @torch.no_grad()
        def pull() -> None:
            for mu, parameters, start in zip(signs, groups, starts, strict=True):
                _pull(parameters, start, mu)

        return pull


def _pull(parameters: list[nn.Parameter], start: list[Tensor], mu: float) -> None:
    moved = [(p, p.grad, before) for p, before in zip(parameters, start, strict=True) if p.grad is not None]
    if not moved:
        return
    now, gradients, before = (list(column) for column in zip(*moved, strict=True))
    torch._foreach_add_(gradients, torch._foreach_sub(now, before), alpha=mu)


@dataclass(frozen=True)
class GradientClip(LocalHook):
    """Scales a client's gradients so that their joint Euclidean norm is at most ``max_norm``.

    The norm is taken over all parameters that the client's optimizer updates: the factors of sharded layers and the
    dense parameters. Weight decay is not part of it, as in a plain ``Trainer(gradient_clip_val=max_norm)``.

    Args:
        max_norm: Largest norm, positive.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> before_step = GradientClip(1.0).start_client(model, torch.optim.SGD(model.parameters(), lr=1.0))
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> before_step()
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """

    max_norm: float

    def __post_init__(self) -> None:
        check_fields(self, max_norm=Number(above=0, finite=False, hint="leave the hook out to clip nothing"))

    def start_client(self, module: nn.Module, optimizer: Optimizer) -> BeforeStep:
        """Collect the parameters to clip; nothing is copied."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]

        def clip() -> None:
            nn.utils.clip_grad_norm_(parameters, self.max_norm)

        return clip
