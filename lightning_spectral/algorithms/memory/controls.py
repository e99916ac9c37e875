"""A control variate for each client, which stays on its device, while the server keeps the sum over all clients."""

# Annotations are evaluated eagerly here, because jsonargparse resolves inherited ones in the file of the subclass.

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide, FedAvg
from lightning_spectral.algorithms.memory.kept import ClientSum
from lightning_spectral.client.device import StepActions
from lightning_spectral.nn.cost import Cost
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload
from lightning_spectral.sums import RunningMean
from lightning_spectral.sums.exact_mean import largest_magnitudes, largest_within

# before the name of a parameter: the server's control in downloads, the client's own on its device
CONTROL = "control:"


def adding(addends: Mapping[nn.Parameter, Callable[[], Tensor]]) -> Callable[[Optimizer], None]:
    """An action before each step that adds to the gradients of some parameters, after the user's local hooks.

    A parameter that is not in the loss of a step has gradient zero.
    """

    @torch.no_grad()
    def add(optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            sign = -1.0 if group.get("maximize") else 1.0  # it reverses the sign of gradients
            for parameter in group["params"]:
                if parameter.requires_grad and (addend := addends.get(parameter)) is not None:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    parameter.grad.add_(addend(), alpha=sign)

    return add


@dataclass(frozen=True)
class ControlSide(DenseSide):
    r"""Whole models, and a control :math:`c_i` for each parameter, which the client keeps and the server never sees.

    Both sides compute the same change of it, :math:`\delta c_i = a (x - y) - c`, from what the client was sent, which
    is x and perhaps a control c, and from what it sends back, y.

    Attributes:
        trained: Names of the parameters that have a control.
    """

    trained: tuple[str, ...] = field(kw_only=True)

    @abstractmethod
    def scale(self, upload: Upload) -> float:
        """The factor a of a turn; 0 if the client learns nothing, so that its control stays as it is."""

    @abstractmethod
    def addends(self, client: nn.Module, download: Download) -> Mapping[nn.Parameter, Callable[[], Tensor]]:
        """What is added to the gradient of each of these parameters before a step."""

    @torch.no_grad()
    def changes(self, sent: Tensors, upload: Upload) -> dict[str, Tensor]:
        """The change of a client's control in a turn, in at least single precision; empty if it learns nothing."""
        changes: dict[str, Tensor] = {}
        scale = self.scale(upload)
        for name in self.trained if scale else ():
            wide = torch.promote_types(sent[name].dtype, torch.float32)
            changes[name] = (sent[name].to(wide) - upload.tensors[name].to(wide)).mul_(scale)
            if (control := sent.get(f"{CONTROL}{name}")) is not None:
                changes[name].sub_(control)
        return changes

    def load(self, client: nn.Module, download: Download) -> None:
        tensors = {name: tensor for name, tensor in download.tensors.items() if not name.startswith(CONTROL)}
        super().load(client, replace(download, tensors=tensors))

    def start(self, client: nn.Module, download: Download) -> StepActions | Sequence[StepActions] | None:
        return self.personal.phases(client, StepActions(before_step=adding(self.addends(client, download))))

    @torch.no_grad()
    def keep(self, client: nn.Module, download: Download, upload: Upload) -> Tensors:
        kept = {**download.client_state, **super().keep(client, download, upload)}
        for name, change in self.changes(download.tensors, upload).items():
            own = download.client_state.get(f"{CONTROL}{name}")
            kept[f"{CONTROL}{name}"] = change if own is None else change.add_(own)
        return kept


class ControlHalf(DenseHalf):
    """Whole models whose clients have controls, bound to a module."""

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters that have a control: all that are trained and shared."""
        own = self.personal.names
        return tuple(name for name, p in self.server.named_parameters() if p.requires_grad and name not in own)

    @property
    def device_options(self) -> Mapping[str, Any]:
        return {**super().device_options, "trained": self.trained}

    @property
    def cost_besides(self) -> Cost:
        return Cost(held_bytes=sum(self.server.get_parameter(name).nbytes for name in self.trained))


class ControlRound(DenseRound):
    """One open round in which clients have controls.

    Attributes:
        side: The device half.
        total: The sum of all clients' controls, weighted by their shares of the data, as the round opened.
        change: Running sum of its change.
    """

    def __init__(self, half: DenseHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        assert isinstance(half.state, ClientSum), "made by `new_state`"
        assert isinstance(half.device_half, ControlSide)
        self.side, self.total = half.device_half, half.state
        self.change = self.total.change(self.side.trained, cohort)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        super().add(receipt, upload)
        if changes := self.side.changes(self.tensors, upload):
            self.change.add(changes, self.cohort.shares[receipt.unit.key])

    @cached_property
    def largest(self) -> Mapping[str, float]:
        """Largest magnitude of each tensor of the download that enters a change."""
        return largest_magnitudes(
            {n: t for n, t in self.tensors.items() if n.removeprefix(CONTROL) in self.change.names}
        )

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        """Largest magnitude in the changes of the client's control, or a bound on it."""
        scale, before, after = self.side.scale(upload), self.largest, upload.largest
        bounds = [scale * (before[n] + after[n]) + before.get(f"{CONTROL}{n}", 0.0) for n in self.change.names]

        def changes() -> Tensor:
            return nn.utils.parameters_to_vector(self.side.changes(self.tensors, upload).values())

        return largest_within(max(bounds, default=0.0), changes) if scale else 0.0

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, self.change]

    def close(self) -> None:
        super().close()
        self.total.add(self.change)

    def metrics(self) -> Mapping[str, float]:
        return {"control_norm": float(self.total.values.norm())}


@dataclass(frozen=True)
class WithControls(FedAvg):
    """Federated averaging whose clients have controls."""

    half: ClassVar[type[DenseHalf]] = ControlHalf
    updates_have_norms: ClassVar[bool] = True
    counts_all_clients: ClassVar[bool] = True

    def new_state(self, server: nn.Module, seed: int) -> ClientSum:
        return ClientSum({name: p.shape for name, p in server.named_parameters()})
