"""SCAFFOLD: control variates correct the drift of clients in every local step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_spectral.algorithms.fed_avg import DenseHalf, DenseRound, DenseSide, FedAvg
from lightning_spectral.algorithms.memory.kept import ClientSum
from lightning_spectral.client.device import StepActions
from lightning_spectral.protocol.cohort import Cohort
from lightning_spectral.protocol.exchange import load_tensors
from lightning_spectral.protocol.records import Download, Receipt, Tensors, Upload, WorkUnit
from lightning_spectral.sums import RunningMean
from lightning_spectral.sums.exact_mean import largest_magnitudes, largest_within

CORRECTION = "correction:"  # before the name of a parameter: what is added to its gradients
LEARNING_RATE = "learning_rate:"  # of the round; sent back because the server needs it
UNLIKE = ("momentum", "dampening", "nesterov", "maximize")  # options that make a step something else


@dataclass(frozen=True)
class ScaffoldSide(DenseSide):
    """Whole models whose gradients are corrected before each step, after the user's local hooks."""

    def load(self, client: nn.Module, download: Download) -> None:
        load_tensors(client, {n: t for n, t in download.tensors.items() if not n.startswith(CORRECTION)})

    def start(self, client: nn.Module, download: Download) -> StepActions:
        parameters = dict(client.named_parameters())
        corrected = [(parameters[name], correction) for name, correction in corrections(download.tensors).items()]

        @torch.no_grad()
        def correct(optimizer: Optimizer) -> None:
            for parameter, correction in corrected:
                if parameter.grad is not None:
                    parameter.grad.add_(correction)
                elif parameter.requires_grad:  # not in this step's loss: its gradient is zero
                    parameter.grad = correction.clone()

        return StepActions(before_step=correct)

    def collect(self, client: nn.Module, download: Download) -> Upload:
        upload = super().collect(client, download)
        rates = {float(group["lr"]) for groups in download.options for group in groups}
        check_one_rate(rates)
        device = next(iter(upload.tensors.values())).device
        rate = torch.tensor(next(iter(rates), 0.0), dtype=torch.float64, device=device)
        return Upload(download.unit, {**upload.tensors, LEARNING_RATE: rate})


def corrections(tensors: Tensors) -> dict[str, torch.Tensor]:
    """The corrections in a download, by the parameters' names.

    Example:
        >>> corrections({"bias": torch.zeros(1), "correction:bias": torch.ones(1)})
        {'bias': tensor([1.])}
    """
    return {n.removeprefix(CORRECTION): t for n, t in tensors.items() if n.startswith(CORRECTION)}


def check_one_rate(rates: set[float]) -> None:
    """Raise ``ValueError`` if there are several learning rates."""
    if len(rates) > 1:
        raise ValueError(
            f"SCAFFOLD needs one learning rate for all parameters, got {', '.join(map(str, sorted(rates)))}; give all "
            "parameter groups the same, in every round."
        )


def _distance(upload: Upload) -> float:
    return upload.num_steps * float(upload.tensors[LEARNING_RATE])


class ScaffoldRound(DenseRound):
    """One open round of SCAFFOLD.

    Attributes:
        control: The server's control c, as it was when the round opened.
        change: Running sum of its change.
    """

    def __init__(self, half: DenseHalf, cohort: Cohort) -> None:
        super().__init__(half, cohort)
        assert isinstance(half.state, ClientSum), "made by `new_state`"
        self.control = half.state
        trained = [n for n, p in half.server.named_parameters() if p.requires_grad and n in self.mean.names]
        self.change = self.control.change(trained, cohort)

    def send(self, unit: WorkUnit) -> tuple[Download, Receipt]:
        server = self.control.pieces()
        correction = {
            f"{CORRECTION}{name}": (server[name] - control).to(self.tensors[name].dtype)
            for name, control in self.controls(unit).items()
        }
        return Download(unit, 1.0, {**self.tensors, **correction}), Receipt(unit, 1.0, correction)

    def add(self, receipt: Receipt, upload: Upload) -> None:
        super().add(receipt, upload)
        unit, distance = receipt.unit, _distance(upload)
        if distance == 0.0:
            return  # nothing to learn from: the control is unchanged
        before, after = self.controls(unit), self.new_controls(receipt, upload, distance)
        self.change.add({name: after[name].double() - before[name] for name in after}, self.cohort.shares[unit.key])
        self.cohort.store[unit] = after

    def largest_summand(self, receipt: Receipt, upload: Upload) -> float:
        r"""Largest magnitude in the change of the client's control, :math:`(x - y) / (K \eta) - c`, or a bound."""
        distance = _distance(upload)
        if distance == 0.0:
            return 0.0
        weights, controls = self.largest
        bounds = [(upload.largest[n] + weights[n]) / distance + controls[n] for n in self.change.names]

        def change() -> Tensor:
            before, after = self.controls(receipt.unit), self.new_controls(receipt, upload, distance)
            return nn.utils.parameters_to_vector([after[name].double() - before[name] for name in after])

        return largest_within(max(bounds, default=0.0), change)

    def controls(self, unit: WorkUnit) -> dict[str, Tensor]:
        """The control of one client, float64; zeros if it has none yet."""
        store = self.cohort.store
        return {name: t.double() for name, t in store[unit].items()} if unit in store else dict(self.change.before)

    def new_controls(self, receipt: Receipt, upload: Upload, distance: float) -> dict[str, Tensor]:
        """The new control of one client; ``distance`` is its number of steps times the learning rate, above 0."""
        after = {}
        for name, correction in corrections(receipt.drawn).items():
            moved = upload.tensors[name].double() - self.tensors[name].double()
            after[name] = (-moved / distance - correction).to(torch.promote_types(correction.dtype, torch.float32))
        return after

    @cached_property
    def largest(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Largest magnitude of each trained parameter before the round, and of the server's control for it."""
        held = self.tensors, self.control.pieces()
        weights, controls = (largest_magnitudes({name: of[name] for name in self.change.names}) for of in held)
        return weights, controls

    @property
    def sums(self) -> Sequence[RunningMean]:
        return [self.mean, self.change]

    def close(self) -> None:
        super().close()
        self.control.add(self.change)

    def metrics(self) -> Mapping[str, float]:
        return {"control_norm": float(self.control.values.norm())}


@dataclass(frozen=True)
class Scaffold(FedAvg):
    r"""Federated averaging in which clients add :math:`c - c_i` to their gradients, so that they do not drift apart.

    A client's control :math:`c_i` is the mean gradient over the local steps of its last turn, before correction. The
    server's control is :math:`c = \sum_i d_i c_i` over all clients, where d is a client's share of all examples, the
    same in every round. All controls start at zero. After K local steps with learning rate :math:`\eta`, from x to y,

    .. math:: c_i \leftarrow c_i - c + \frac{x - y}{K \eta}, \qquad c \leftarrow c + \sum_{i \in A} d_i \, \delta c_i,

    where the sum is over the round's clients A. The server's weights are updated as in `FedAvg`. Clients need plain
    SGD. Weight decay is allowed and counts as part of the gradient. So do changes that local hooks make to gradients,
    because the correction is added after them. A parameter that is not in a step's loss has gradient zero. A client
    that takes no step, has learning rate 0 or is left out keeps its control.

    A download holds the model and the correction, which doubles its size if all parameters are trained. The server
    computes the new controls itself, so an upload is that of `FedAvg` plus the learning rate, 8 bytes. For N clients,
    the server stores N times the trainable parameters, logged as ``fl/store_bytes``.

    Note:
        The new control is the paper's option II. K counts steps, whereas some implementations count epochs. With
        gradient scaling (``precision="16-mixed"``) K includes steps that are skipped because a gradient overflowed, so
        the controls of such rounds are too small.

    Reference:
        Karimireddy et al. (2020), SCAFFOLD, Algorithm 1 and equation (4), where all shares are 1/N.

    Example:
        >>> line = nn.Linear(2, 1)
        >>> Scaffold().check_optimizer(torch.optim.SGD(line.parameters(), lr=0.1, momentum=0.9), line)
        Traceback (most recent call last):
        ValueError: SCAFFOLD needs plain SGD, got momentum=0.9; leave it out. A server may have momentum: FedAvgM.
    """

    side: ClassVar[type[DenseSide]] = ScaffoldSide
    round: ClassVar[type[DenseRound]] = ScaffoldRound
    updates_have_norms: ClassVar[bool] = True
    counts_all_clients: ClassVar[bool] = True

    def check_optimizer(self, template: Optimizer, server: nn.Module) -> None:
        """Raise ``ValueError`` unless one optimizer steps all trainable parameters by one rate times the gradient."""
        if type(template) is not SGD:
            raise ValueError(
                f"SCAFFOLD needs plain SGD, got {type(template).__name__}; use torch.optim.SGD without momentum, and "
                "an adaptive optimizer at the server, e.g. FedAdam."
            )
        for name, value in ((name, group[name]) for group in template.param_groups for name in UNLIKE):
            if value:
                raise ValueError(
                    f"SCAFFOLD needs plain SGD, got {name}={value!r}; leave it out. A server may have momentum: "
                    "FedAvgM."
                )
        check_one_rate({float(group["lr"]) for group in template.param_groups})
        held = {id(parameter) for group in template.param_groups for parameter in group["params"]}
        if missing := [name for name, p in server.named_parameters() if p.requires_grad and id(p) not in held]:
            raise ValueError(
                "SCAFFOLD needs one optimizer for all trainable parameters, and yours does not step "
                f"{', '.join(missing)}; give it all of them, or freeze the others with `requires_grad_(False)`."
            )

    def new_state(self, server: nn.Module, seed: int) -> ClientSum:
        return ClientSum({name: p.shape for name, p in server.named_parameters()})
